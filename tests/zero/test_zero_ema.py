"""Averages of weights under ZeRO: what is averaged, at any layout, and that they come and go without a trace."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from gathering_plugin import GatheringPlugin
from safetensors.torch import load_file
from torch import nn

import booster_runtime
from booster_core import Booster
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

WIDTH, DECAY = 8, 0.75


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return net.requires_grad_()


def train(booster, model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


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
