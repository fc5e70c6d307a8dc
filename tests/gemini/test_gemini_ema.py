"""Averages of weights that are in chunks equal torch's own, wherever the chunks are, and leave no trace."""

import torch
import torch.distributed as dist
from matrix import matrix
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import booster_runtime
from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_runtime import collectives
from booster_testing import run_on_ranks

WIDTH, DECAY = 8, 0.75
VARIANTS = {
    "here": {},
    "whole between steps": {"shard_param_frac": 0.0},
    "whole parameters": {"partition": "parameter"},
    "disk": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def copy_into(mirror, model, booster):
    """Copy the model's values, and in place of parameters their masters where there are some."""
    with torch.no_grad():
        for own, theirs in zip(mirror.state_dict().values(), model.state_dict().values(), strict=True):
            own.copy_(theirs)
        masters = {}
        for shard in booster.state_adapter(model).optimizer_shards():
            if shard.state == "master":
                start, stop = shard.flat or (0, shard.numel)
                masters.setdefault(shard.name, torch.zeros(shard.global_shape)).view(-1)[start:stop] = (
                    shard.data.flatten()
                )
        for name, parameter in mirror.named_parameters():
            if any(collectives.all_gather_object(name in masters)):
                whole = masters.get(name, torch.zeros_like(parameter))
                dist.all_reduce(whole)
                parameter.copy_(whole)


def averages(options, precision):
    """Train and average next to torch's own average of what the optimizer updates."""
    booster = Booster("cpu", precision, GeminiPlugin(min_chunk_bytes=64, **options))
    net = make()
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    ema = booster_runtime.ema(booster, model, DECAY)
    mirror = make()
    copy_into(mirror, model, booster)
    reference = AveragedModel(mirror, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    reference.update_parameters(mirror)
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        copy_into(mirror, model, booster)
        reference.update_parameters(mirror)
    before, probe = model.state_dict(), torch.ones(3, WIDTH)
    model.eval()
    with ema.applied():
        inside = model.state_dict()
        with torch.no_grad():
            output = model(probe)
    after = model.state_dict()
    expected = reference.module.state_dict()
    for name, tensor in inside.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
        assert torch.equal(after[name], before[name]), name
    reference.module.eval()
    with torch.no_grad():
        wanted = reference.module(probe)
    return (output.float() - wanted).abs().max().item()


@matrix(1, size=[1, 2], name=VARIANTS, precision=["fp32", "bf16"])
def test_averages_equal_torchs(name, precision, size, tmp_path):
    options = dict(VARIANTS[name])
    if name == "disk":
        options["offload_dir"] = str(tmp_path)
    for difference in run_on_ranks(averages, size, options, precision):
        assert difference <= (1e-6 if precision == "fp32" else 0.05)


def evaluates(folder):
    """Average while training, and return what a model without an optimizer computes with the loaded averages."""
    booster = Booster("cpu", "bf16", GeminiPlugin(min_chunk_bytes=64))
    net = make()
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    ema = booster_runtime.ema(booster, model, DECAY)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    ema.save(folder)
    outputs, probe = [], torch.ones(3, WIDTH)
    loaded, *_ = booster.boost(make())
    other = booster_runtime.ema(booster, loaded)
    other.load(folder)
    before = loaded.state_dict()
    for each, average in ((model, ema), (loaded, other)):
        each.eval()
        with average.applied(), torch.no_grad():
            outputs.append(each(probe))
    after = loaded.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return outputs


def test_averages_are_evaluated_without_an_optimizer(tmp_path):
    for trained, loaded in run_on_ranks(evaluates, 2, str(tmp_path / "ema.safetensors")):
        assert torch.equal(trained, loaded)
