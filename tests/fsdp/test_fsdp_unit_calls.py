"""Ranks that run different units raise: without mixing values on CPUs, and in the step at the latest."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin, collectives
from booster_testing import expect_on_ranks


class Skipping(nn.Module):
    """Four layers, of which each rank skips another one if told to, in forward or in the loss."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        if width != 8:
            self.layers[1] = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))

    def forward(self, x, skipped):
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = x + torch.tanh(layer(x))
        return x


def train(width, by_rank, num_steps):
    torch.manual_seed(0)
    model = Skipping(width)
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_if=lambda name, _: name.count(".") == 1))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(num_steps):
        skipped = None if step < num_steps - 1 else 1 + (dist.get_rank() if by_rank else 0)
        booster.backward(model(torch.ones(2, 8), skipped).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("width", "num_ranks"), [(8, 2), (16, 3)], ids=["of one size", "of other sizes"])
def test_different_units_raise_without_mixing_values(width, num_ranks):
    expect_on_ranks(ConfigError, "rank 0 .* of 'layers.*, and rank 1 .* of 'layers", train, num_ranks, width, True, 2)


@raises_on_ranks(ConfigError, "call 3 was the forward of 'layers.2' on rank 0, the forward of 'layers.1' on rank 1", 2)
def test_different_units_raise_in_the_step():
    with mock.patch.object(collectives._OfUnit, "_announce"):
        train(8, True, 2)


@on_ranks(2)
def test_a_unit_that_all_ranks_skip_trains():
    train(8, False, 2)


@pytest.mark.parametrize("names", [["0.weight"], ["0.weight", "0.bias"]], ids=["of a unit", "a whole unit"])
@raises_on_ranks(ConfigError, r"Parameter '0\.weight' is frozen on rank 1 and trained on rank 0", 2)
def test_parameters_that_some_ranks_freeze_are_named(names):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name in names:
        model.get_parameter(name).requires_grad_(dist.get_rank() == 0)
    booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()


@raises_on_ranks(
    ConfigError,
    "rank 0 of the group (gathers|reduces) 64 elements of '0', and rank 1 .* (gathers|reduces) 64 elements",
    2,
)
def test_a_gather_that_meets_a_reduction_of_the_same_unit_raises():
    torch.manual_seed(0)
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_if=lambda name, _: name == "0"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if dist.get_rank() == 1:
        model(torch.ones(2, 8))
    booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()
