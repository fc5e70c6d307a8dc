"""Parameters that torch's FSDP can't shard are replicated, or refused on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model


class WithEmpty(nn.Module):
    """A layer, and a parameter without rows that forward uses."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.rows = nn.Parameter(torch.empty(0, 8))

    def forward(self, x):
        return torch.cat([self.inner(x), x @ self.rows.t()], dim=1)


def compare_empty_parameter():
    torch.manual_seed(0)
    model, plain = WithEmpty(), WithEmpty()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    boosted, wrapped, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        whole = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        booster.backward(boosted(whole[dist.get_rank() :: 2]).square().mean(), wrapped)
        wrapped.step()
        wrapped.zero_grad()
        plain(whole).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_tensors(whole_model(booster, boosted), plain.state_dict(), tolerance_for(torch.float32))


def test_empty_parameter_equals_one_process():
    run_on_ranks(compare_empty_parameter, 2)


def boost_with(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8, sparse=change == "sparse"), nn.Linear(8, 8))
    if change == "hook":
        model[1].weight.register_hook(lambda gradient: 3 * gradient)
    elif change == "accumulate hook":
        model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("hook", "Parameter '1.weight' has hooks on its gradient, which FSDP drops"),
        ("accumulate hook", "Parameter '1.weight' has hooks on its gradient, which FSDP drops"),
        ("sparse", "The gradients of '0' are sparse.*sparse=False"),
    ],
)
def test_boost_refuses(change, match):
    expect_on_ranks(ConfigError, match, boost_with, 2, change)
