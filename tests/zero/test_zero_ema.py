"""Averages of weights under ZeRO: what is averaged, at any layout, and that they come and go without a trace."""

import torch
import torch.distributed as dist
from matrix import matrix
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import booster_runtime
from booster_core import Booster
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

WIDTH, DECAY = 8, 0.75
VARIANTS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "whole parameters": {"partition": "parameter"},
    "offload": {"offload": "cpu"},
    "overlap": {"overlap_allgather": True},
}


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return net.requires_grad_()


def boost(options, precision="fp32"):
    booster = Booster("cpu", precision, LowLevelZeroPlugin(bucket_bytes=64, **options))
    net = make()
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return booster, model, optimizer


def train(booster, model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def averages(options, precision):
    """Train and average next to torch's own average of what forward reads, kept in fp32."""
    booster, model, optimizer = boost(options, precision)
    ema = booster_runtime.ema(booster, model, DECAY)
    mirror = make().float()

    def look():
        with torch.no_grad():
            for own, theirs in zip(mirror.state_dict().values(), model.state_dict().values(), strict=True):
                own.copy_(theirs)

    look()
    reference = AveragedModel(mirror, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    reference.update_parameters(mirror)
    for step in range(4):
        train(booster, model, optimizer, 1, first=step)
        ema.update()
        look()
        reference.update_parameters(mirror)
    found = {shard.name: shard.data.clone() for shard in ema.shards()}
    expected = dict(reference.module.named_parameters())
    return {name: (found[name], value.detach()) for name, value in expected.items()}


@matrix(["whole parameters-fp32"], variant=list(VARIANTS), precision=["fp32", "bf16"])
def test_averages_are_torch_s_of_the_values_that_forward_reads(variant, precision):
    for found in run_on_ranks(averages, 2, VARIANTS[variant], precision):
        for average, expected in found.values():
            assert average.dtype == torch.float32
            assert torch.equal(average, expected)


def distance_from_masters():
    booster, model, optimizer = boost({}, "bf16")
    ema = booster_runtime.ema(booster, model, DECAY)
    index_of = {name: index for index, name in optimizer.names.items()}
    masters = {}
    for step in range(6):
        train(booster, model, optimizer, 1, first=step)
        ema.update()
        for piece in optimizer.layout.pieces().values():
            values = piece.values.detach().flatten().float()
            before = masters.get(piece.index)
            masters[piece.index] = values.clone() if before is None else DECAY * before + (1 - DECAY) * values
    worst = 0.0
    pieces = optimizer.layout.pieces()
    for shard in ema.shards():
        piece = pieces.get(index_of.get(shard.name))
        if piece is not None and step > 0:
            average = shard.data.flatten()[piece.start : piece.stop]
            expected = masters[piece.index]
            # The first average starts at the initial values, the other at those after a step.
            start = DECAY**6
            worst = max(worst, float(((average - expected).abs() - start * 0.02 - expected.abs() * 2**-8).max()))
    return worst


def test_averages_stay_within_a_rounding_of_those_of_the_masters():
    assert all(worst <= 0 for worst in run_on_ranks(distance_from_masters, 2))


def applies_and_goes_on(options, precision):
    runs = []
    for applies in (False, True):
        booster, model, optimizer = boost(options, precision)
        ema = booster_runtime.ema(booster, model, DECAY)
        for step in range(4):
            train(booster, model, optimizer, 1, first=step)
            ema.update()
            if applies:
                with ema.applied():
                    model.eval()
                    model(torch.ones(2, WIDTH))
                    model.train()
        runs.append({name: value.clone() for name, value in model.state_dict().items()})
    return all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@matrix(["overlap-bf16"], variant=["stage 2", "overlap"], precision=["fp32", "bf16"])
def test_applying_averages_leaves_no_trace_in_training(variant, precision):
    assert run_on_ranks(applies_and_goes_on, 2, VARIANTS[variant], precision) == [True, True]


def saves(options, folder):
    booster, model, optimizer = boost(options, "bf16")
    ema = booster_runtime.ema(booster, model, DECAY)
    train(booster, model, optimizer, 3)
    ema.update()
    ema.save(folder)
    return {shard.name: shard.data.clone() for shard in ema.shards()}


def loads(options, folder):
    booster, model, _ = boost(options, "bf16")
    ema = booster_runtime.ema(booster, model, DECAY)
    ema.load(folder)
    return {shard.name: shard.data.clone() for shard in ema.shards()}


def test_saved_averages_load_at_another_number_of_ranks_and_stage(tmp_path):
    path = str(tmp_path / "average.safetensors")
    saved = run_on_ranks(saves, 2, {"stage": 1}, path)[0]
    assert load_file(path)["0.weight"].dtype == torch.float32
    for loaded in run_on_ranks(loads, 3, {"stage": 2}, path):
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
