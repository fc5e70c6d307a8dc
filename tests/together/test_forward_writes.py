"""A forward that changes parameters: it trains as in one process, or raises on every rank where that would be lost."""

import pytest
import torch
from cases import Case, assert_equals_one_process, noise, train_boosted
from plugin_runs import RUNS
from torch import nn

from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)


CASE = Case(build=Clamped, batch=noise(4, 8), steps=2)


@pytest.mark.parametrize(
    ("plugin", "match"),
    [
        ("fsdp", "'inner.weight' was changed during forward. FSDP drops"),
        ("gemini", "'inner.weight' was changed in place"),
    ],
)
def test_change_of_a_gathered_parameter_raises(plugin, match):
    expect_on_ranks(ConfigError, match, train_boosted, 2, CASE, RUNS[plugin])


@pytest.mark.parametrize("plugin", ["ddp", "zero1", "hybrid-dp"])
def test_change_of_a_replicated_parameter_trains(plugin):
    assert_equals_one_process(CASE, RUNS[plugin])
