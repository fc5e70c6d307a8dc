"""A torch without the dispatch key by which uses of absent parameters are seen."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from booster_runtime.memory import absent
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.training import whole_model

PLUGINS = {
    "zero 1": lambda: LowLevelZeroPlugin(stage=1),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1),
    "gemini": GeminiPlugin,
}


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def loss_of(model, step):
    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean()


def train_without_key(name):
    with mock.patch.multiple(absent, _BIT=None, _KEY=None):
        net, optimizer = make()
        booster = Booster("cpu", plugin=PLUGINS[name]())
        model, optimizer, *_ = booster.boost(net, optimizer)
        for step in range(3):
            booster.backward(loss_of(model, step), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return whole_model(booster, model)


@pytest.mark.parametrize("name", ["zero 1", "zero 2", "hybrid"])
def test_what_keeps_parameters_whole_trains_without_it(name):
    net, optimizer = make()
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for trained in run_on_ranks(train_without_key, 2, name):
        # The mean of two equal gradients has their bits.
        torch.testing.assert_close(trained, dict(net.state_dict()), rtol=0.0, atol=1e-6)


def test_gemini_says_that_it_needs_it():
    expect_on_ranks(ConfigError, "has no dispatch key TESTING_ONLY_GenericWrapper", train_without_key, 2, "gemini")
