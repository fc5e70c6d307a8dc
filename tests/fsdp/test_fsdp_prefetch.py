"""Units of the FSDP plugin that are gathered ahead of their forward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model


class Skipping(nn.Module):
    """Layers, some of which a call may leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, skipped=()):
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                x = torch.tanh(layer(x))
        return x


def batch(number):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def trained(options, *, evaluates, skipped):
    """Return the values after steps, right before which the model has run with some layers left out."""
    rank, size = dist.get_rank(), dist.get_world_size()
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_classes=["Linear"], **options))
    net = Skipping()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5))
    for number in range(4):
        booster.backward(model(batch(number)[rank::size]).square().mean(), optimizer)
        with torch.set_grad_enabled(not evaluates):
            model(batch(number)[rank::size], skipped)
        optimizer.step()
        optimizer.zero_grad()
    return whole_model(booster, model)


def in_one_process():
    net = Skipping()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for number in range(4):
        net(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


@pytest.mark.parametrize("evaluates", [True, False], ids=["without gradients", "without backward"])
@pytest.mark.parametrize("options", [{}, {"forward_prefetch": 2}], ids=["default", "two ahead"])
@pytest.mark.parametrize("skipped", [(1,), (1, 2), (3,)], ids=str)
def test_layers_that_were_gathered_ahead_and_left_out_have_the_values_of_the_next_step(options, evaluates, skipped):
    expected = in_one_process()
    for values in run_on_ranks(trained, 2, options, evaluates=evaluates, skipped=skipped):
        assert_same_tensors(values, expected, tolerance_for(torch.float32))
