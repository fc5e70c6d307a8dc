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


class MovingAverage(nn.Module):
    """Updates a second network in forward, as momentum encoders do: in its memory, or by other memory."""

    def __init__(self, assigns):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.slow = nn.Linear(8, 8)
        self.slow.requires_grad_(False)
        self.assigns = assigns

    def forward(self, x):
        for slow, fast in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
            if self.assigns:
                slow.data = slow.data * 0.9 + fast.data * 0.1
            else:
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return self.inner(x) - self.slow(x)


def train_average(plugin, assigns):
    torch.manual_seed(0)
    booster, model, optimizer = boost(MovingAverage(assigns), plugin)
    for _ in range(2):
        booster.backward(model(torch.ones(4, 8)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.unwrap().state_dict().items()}


@pytest.mark.parametrize(
    ("plugin", "assigns", "match"),
    [
        ("fsdp", True, r"'slow.weight' was changed during forward. FSDP drops"),
        ("gemini", True, r"'slow.weight' was given other memory"),
    ],
)
def test_change_through_data_of_a_gathered_parameter_raises(plugin, assigns, match):
    expect_on_ranks(ConfigError, match, train_average, 2, plugin, assigns)


@pytest.mark.parametrize(
    "plugin", ["ddp", pytest.param("zero", marks=pytest.mark.slow), pytest.param("hybrid", marks=pytest.mark.slow)]
)
def test_change_through_data_of_a_replicated_parameter_is_kept(plugin):
    torch.manual_seed(0)
    model = MovingAverage(assigns=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run_on_ranks(train_average, 2, plugin, False):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("plugin", ["ddp", "zero", "hybrid"])
def test_change_of_a_replicated_parameter_trains(plugin):
    run_on_ranks(train_clamped, 2, plugin)
