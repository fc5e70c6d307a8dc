"""An optimizer that is made after `boost`, from the boosted model's parameters, as users of Fabric write it, under DDP.

Strategies that shard refuse it: `test_gradients_without_optimizer.py`.
"""

from __future__ import annotations

import contextlib

import torch
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError
from booster_core.ranks.coordinator import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "ddp, no search": (TorchDDPPlugin, {"find_unused_parameters": False}),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5),
}


class Net(nn.Module):
    """Layers with a BatchNorm, a scalar, and a layer that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, *, more=False):
        hidden = self.body(x) * self.scale
        return self.sometimes(hidden) if more else hidden


def net():
    torch.manual_seed(2)
    return Net()


def data(step, rank=0, world_size=1, samples=8):
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(step))[rank::world_size]


def train(model, optimizer, no_sync, rank, world_size, *, searches=True):
    """Three steps of two micro-batches each, the last of one alone, with a forward without backward before a step."""
    for step in range(3):
        for micro in range(1 if step == 2 else 2):
            with no_sync() if micro == 0 else contextlib.nullcontext():
                out = model(data(10 * step + micro, rank, world_size), more=step < 2 or not searches)
                out.square().mean().backward()
        with torch.no_grad():
            model(data(99))
        optimizer.step()
        optimizer.zero_grad()


def train_late(name, kind):
    coordinator = DistCoordinator()
    plugin, options = PLUGINS[name]
    booster = Booster("cpu", plugin=plugin(**options))
    searches = name != "ddp, no search"
    original = net()
    if not searches:
        original.never.requires_grad_(requires_grad=False)
    model, *_ = booster.boost(original)
    optimizer = OPTIMIZERS[kind](model.parameters())
    no_sync = lambda: booster.no_sync(model, optimizer)  # noqa: E731
    train(model, optimizer, no_sync, coordinator.rank, coordinator.world_size, searches=searches)
    return whole_model(booster, model)


@matrix(["ddp-sgd"], name=PLUGINS, kind=OPTIMIZERS)
def test_training_equals_that_of_one_process(name, kind):
    reference = net()
    train(reference, OPTIMIZERS[kind](reference.parameters()), contextlib.nullcontext, 0, 1, searches="no" not in name)
    for parameters in run_on_ranks(train_late, 2, name, kind):
        assert_same_tensors(parameters, reference.state_dict(), tolerance_for(torch.float32))


def graph_twice(name):
    plugin, options = PLUGINS[name]
    model, *_ = Booster("cpu", plugin=plugin(**options)).boost(net())
    out = model(data(0, DistCoordinator().rank, 2), more=True)
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def test_what_ddp_does_not_average_raises_where_no_step_could():
    expect_on_ranks(GradientError, "Pass the optimizer to `boost`", graph_twice, 2, "ddp")
