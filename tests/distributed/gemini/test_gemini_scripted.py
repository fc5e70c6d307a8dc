"""Scripted modules, whose parameters Gemini can't gather, are refused on every rank."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_gemini import GeminiPlugin
from booster_testing import expect_on_ranks


def boost_scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        part = torch.jit.script(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), part)
    Booster("cpu", plugin=GeminiPlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_boost_refuses_scripted_module_by_name():
    expect_on_ranks(ConfigError, "Module '1' is scripted, so its parameters can't be gathered", boost_scripted, 2)
