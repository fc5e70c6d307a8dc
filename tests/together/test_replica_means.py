"""Means over replicas that travel in a narrow format are rounded once, whatever number of backward passes they sum."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_hybrid import DataParallelConfig, HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "zero, a replica each": lambda: LowLevelZeroPlugin(replica_size=2, communication_dtype="bf16"),
    "hybrid": lambda: HybridParallelPlugin(ddp=DataParallelConfig(communication_dtype="bf16")),
}


def means(plugin):
    """Return the gradient after each of several backward passes that are reduced."""
    booster = Booster(plugin=PLUGINS[plugin]())
    layer = nn.Linear(1, 1, bias=False)
    model, optimizer, *_ = booster.boost(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    found = []
    for size in (256.0, 1.0, 1.0, 0.25):
        booster.backward(model(torch.full((1, 1), size + dist.get_rank() * size)).sum(), optimizer)
        found.append(float(full_gradient(booster, model, "weight")))
    return found


@pytest.mark.parametrize("plugin", list(PLUGINS))
def test_what_was_averaged_before_is_not_rounded_again(plugin):
    # bf16 keeps 8 bits: 384 and 1.5 are exact, 385.5 is not.
    assert run_on_ranks(means, 2, plugin) == [[384.0, 385.5, 387.0, 387.375]] * 2
