"""Accumulated steps under every plugin are those of large batches, also at the end of an epoch."""

import pytest
import torch
from accumulation_runs import assert_accumulates
from named_plugins import plugin_named

from booster_core import Booster
from booster_runtime import reduce
from booster_testing import run_on_ranks


@pytest.mark.parametrize("plugin", ["ddp", "zero", "fsdp", pytest.param("gemini", marks=pytest.mark.slow), "hybrid"])
def test_accumulated_steps_are_those_of_large_batches_also_at_an_end_of_an_epoch(plugin):
    assert_accumulates(plugin)


def _reduced(plugin):
    booster = Booster(plugin=plugin_named(plugin))
    coordinator = booster.context.coordinator
    index, size = booster.plugin.data_parallel_coordinates(coordinator)
    values = {"loss": torch.tensor([1.0, 3.0]) * (index + 1), "hits": index + 3, "seen": (torch.tensor(2 + index),)}
    if plugin == "hybrid-pp" and coordinator.rank == 0:
        values = None  # a stage without outputs
    means, sums = reduce(booster, values), reduce(booster, values, "sum")
    return size, means["loss"].tolist(), means["seen"][0].item(), sums["hits"].item(), sums["seen"][0].item()


@pytest.mark.parametrize("plugin", ["zero", "hybrid-tp", "hybrid-pp"])
def test_values_of_each_data_parallel_rank_are_reduced_once(plugin):
    expected = (2, [1.5, 4.5], 2.5, 7, 5) if plugin == "zero" else (1, [1.0, 3.0], 2.0, 3, 2)
    assert run_on_ranks(_reduced, 2, plugin) == [expected] * 2
