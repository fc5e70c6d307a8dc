"""Strategies that move parameters into buffers refuse those that are tied by their memory alone, lazy models' too."""

from __future__ import annotations

import contextlib

import torch
from matrix import matrix, named
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime.lazy import LazyInitContext
from booster_testing import expect_on_ranks
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "zero": LowLevelZeroPlugin,
    "fsdp": TorchFSDPPlugin,
    "gemini": GeminiPlugin,
    "hybrid": HybridParallelPlugin,
}


def boost(name, lazily):
    with LazyInitContext() if lazily else contextlib.nullcontext():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight = nn.Parameter(net[0].weight.data, requires_grad=False)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    Booster("cpu", plugin=PLUGINS[name]()).boost(net, torch.optim.AdamW(trained))


@matrix(["eager-zero"], lazily=named([False, True], ["eager", "lazy"]), name=PLUGINS)
def test_parameters_over_one_memory_are_refused(name, lazily):
    expect_on_ranks(
        ConfigError, "'0.weight' and '1.weight' are two objects over the same memory", boost, 2, name, lazily
    )
