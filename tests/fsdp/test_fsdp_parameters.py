"""Parameters that torch's FSDP can't shard are replicated, or refused on every rank."""

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, noise
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing import expect_on_ranks


class WithEmpty(nn.Module):
    """A layer, and a parameter without rows that forward uses."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.rows = nn.Parameter(torch.empty(0, 8))

    def forward(self, x):
        return torch.cat([self.inner(x), x @ self.rows.t()], dim=1)


def test_empty_parameter_equals_one_process():
    assert_equals_one_process(Case(build=WithEmpty, batch=noise(4, 8)), Setting(TorchFSDPPlugin))


def boost_with(change):
    model = nn.Sequential(nn.Embedding(10, 8, sparse=change == "sparse"), nn.Linear(8, 8))
    if change == "hook":
        model[1].weight.register_hook(lambda gradient: 3 * gradient)
    elif change == "accumulate hook":
        model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


HOOKS = "Parameter '1.weight' has hooks on its gradient, which FSDP drops"


@pytest.mark.parametrize(
    ("change", "match"),
    [("hook", HOOKS), ("accumulate hook", HOOKS), ("sparse", "The gradients of '0' are sparse.*sparse=False")],
)
def test_boost_refuses(change, match):
    expect_on_ranks(ConfigError, match, boost_with, 2, change)
