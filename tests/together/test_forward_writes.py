"""A forward that changes parameters, which would be lost or differ between ranks, raises on every rank."""

from __future__ import annotations

import importlib

import pytest
import torch
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks, run_on_ranks

PLUGINS = {
    "ddp": "booster_ddp.TorchDDPPlugin",
    "fsdp": "booster_fsdp.TorchFSDPPlugin",
    "zero": "booster_zero.LowLevelZeroPlugin",
    "gemini": "booster_gemini.GeminiPlugin",
    "hybrid": "booster_hybrid.HybridParallelPlugin",
}


def boost(model, plugin):
    home, _, kind = PLUGINS[plugin].rpartition(".")
    booster = Booster("cpu", plugin=getattr(importlib.import_module(home), kind)())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def boost_renormalized(plugin, kind):
    torch.manual_seed(0)
    boost(nn.Sequential(getattr(nn, kind)(10, 8, max_norm=1.0), nn.Linear(8, 8)), plugin)


@matrix(["ddp-Embedding", "gemini-EmbeddingBag"], plugin=PLUGINS, kind=["Embedding", "EmbeddingBag"])
def test_renormalized_embedding_is_refused_at_boost(plugin, kind):
    expect_on_ranks(ConfigError, "Embedding '0' has `max_norm=1`", boost_renormalized, 2, plugin, kind)


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
    booster, model, optimizer = boost(Clamped(), plugin)
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


@pytest.mark.parametrize("plugin", ["ddp", "zero", "hybrid"])
def test_change_of_a_replicated_parameter_trains(plugin):
    run_on_ranks(train_clamped, 2, plugin)
