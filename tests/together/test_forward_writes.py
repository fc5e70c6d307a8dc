"""A forward that changes parameters, which would be lost or differ between ranks, raises on every rank."""

from __future__ import annotations

import pytest
import torch
from plugin_runs import RUNS, boosted
from torch import nn

from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks, run_on_ranks


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)


def train_clamped(plugin):
    torch.manual_seed(0)
    booster, model, optimizer = boosted(RUNS[plugin], Clamped())
    for seed in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed + 10 * torch.distributed.get_rank()))
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("plugin", "match"),
    [
        ("fsdp", "'inner.weight' was changed during forward. FSDP drops"),
        ("gemini", "'inner.weight' was changed in place"),
    ],
)
def test_change_of_a_gathered_parameter_raises(plugin, match):
    expect_on_ranks(ConfigError, match, train_clamped, 2, plugin)


@pytest.mark.parametrize("plugin", ["ddp", "zero1", "hybrid-dp"])
def test_change_of_a_replicated_parameter_trains(plugin):
    run_on_ranks(train_clamped, 2, plugin)
