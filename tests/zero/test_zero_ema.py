"""Averages of weights under ZeRO: what is averaged, at any layout, and that they come and go without a trace."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gathering_plugin import GatheringPlugin
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
    """Train and average next to torch's own average of what the optimizer updates."""
    booster, model, optimizer = boost(options, precision)
    ema = booster_runtime.ema(booster, model, DECAY)
    mirror = make().float()

    def look():
        adapter = booster.state_adapter(model)
        with torch.no_grad():
            for own, theirs in zip(mirror.state_dict().values(), model.state_dict().values(), strict=True):
                own.copy_(theirs)
            for shard in adapter.optimizer_shards():
                if shard.state == "master":
                    start, stop = shard.flat or (0, shard.numel)
                    mirror.get_parameter(shard.name).view(-1)[start:stop] = shard.data.flatten()

    look()
    reference = AveragedModel(mirror, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    reference.update_parameters(mirror)
    for step in range(4):
        train(booster, model, optimizer, 1, first=step)
        ema.update()
        look()
        reference.update_parameters(mirror)
    expected = dict(reference.module.named_parameters())
    found = {name: [] for name in expected}
    for shard in ema.shards():
        if shard.name in expected:
            start, stop = shard.flat or (0, shard.numel)
            found[shard.name].append((shard.data.flatten(), expected[shard.name].detach().flatten()[start:stop]))
    return found


@matrix(["whole parameters-fp32"], variant=list(VARIANTS), precision=["fp32", "bf16"])
def test_averages_are_torch_s_of_what_the_optimizer_updates(variant, precision):
    ranks = run_on_ranks(averages, 2, VARIANTS[variant], precision)
    for name in ranks[0]:
        assert any(found[name] for found in ranks)
    for found in ranks:
        for average, expected in itertools.chain(*found.values()):
            assert average.dtype == torch.float32
            assert torch.equal(average, expected)


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


def loads_and_trains(options, folder):
    """Load averages, and save what is there of them after a step."""
    booster, model, optimizer = boost(options, "bf16")
    ema = booster_runtime.ema(booster, model, DECAY)
    ema.load(folder)
    train(booster, model, optimizer, 1)
    ema.update(1.0)
    ema.save(f"{folder}-again.safetensors")


def test_saved_averages_load_at_another_number_of_ranks_and_stage_and_stay(tmp_path):
    path = str(tmp_path / "average.safetensors")
    run_on_ranks(saves, 2, {"stage": 1}, path)
    run_on_ranks(loads_and_trains, 3, {"stage": 2}, path)
    saved, again = load_file(path), load_file(f"{path}-again.safetensors")
    assert saved["0.weight"].dtype == torch.float32
    parameters = dict(make().named_parameters())
    assert all(torch.equal(again[name], saved[name]) for name in parameters)


def unfreezes(plugin, folder):
    booster = Booster("cpu", "bf16", plugin())
    net = make()
    net[0].requires_grad_(requires_grad=False)
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net[2:].parameters(), lr=0.01))
    ema = booster_runtime.ema(booster, model, DECAY)
    booster.save_model(model, f"{folder}/model-0.safetensors")
    for step in range(3):
        if step == 1:
            net[0].requires_grad_()
            optimizer.add_param_group({"params": [*net[0].parameters()]})
        train(booster, model, optimizer, 1, first=step)
        ema.update()
        booster.save_model(model, f"{folder}/model-{step + 1}.safetensors")
    ema.save(f"{folder}/ema.safetensors")


GETS_NEW_BUCKETS = partial(GatheringPlugin, chunk_bytes=64)


@pytest.mark.parametrize("plugin", [partial(LowLevelZeroPlugin, bucket_bytes=64), GETS_NEW_BUCKETS])
def test_a_parameter_that_is_unfrozen_later_is_averaged_on(plugin, tmp_path):
    run_on_ranks(unfreezes, 2, plugin, str(tmp_path))
    expected = load_file(tmp_path / "model-0.safetensors")
    for step in range(3):
        for name, value in load_file(tmp_path / f"model-{step + 1}.safetensors").items():
            expected[name] = expected[name].lerp(value, 1 - DECAY) if value.is_floating_point() else value
    found = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name, _ in make().named_parameters())
