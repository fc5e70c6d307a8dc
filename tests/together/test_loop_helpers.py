"""Loops under every plugin: steps of micro-batches and of whole batches, and ranks with uneven numbers of them."""

import pytest
import torch
from accumulation_runs import assert_accumulates
from cases import Setting
from matrix import matrix
from named_plugins import NAMES, plugin_named
from plugin_runs import RUNS, runs
from ranked import on_ranks
from uneven_runs import assert_steps_follow_batches, batches_of, boosted
from whole_batches import assert_equals_one_large_batch

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import join, reduce
from booster_zero import LowLevelZeroPlugin


@pytest.mark.parametrize("plugin", ["ddp", "zero", "fsdp", pytest.param("gemini", marks=pytest.mark.slow), "hybrid"])
def test_accumulated_steps_are_those_of_large_batches_also_at_an_end_of_an_epoch(plugin):
    assert_accumulates(plugin)


@pytest.mark.parametrize("plugin", ["zero", "hybrid-tp", "hybrid-pp"])
@on_ranks(2)
def test_values_of_each_data_parallel_rank_are_reduced_once(plugin):
    booster = Booster(plugin=plugin_named(plugin))
    coordinator = booster.context.coordinator
    index, size = booster.plugin.data_parallel_coordinates(coordinator)
    values = {"loss": torch.tensor([1.0, 3.0]) * (index + 1), "hits": index + 3, "seen": (torch.tensor(2 + index),)}
    if plugin == "hybrid-pp" and coordinator.rank == 0:
        values = None  # a stage without outputs
    means, sums = reduce(booster, values), reduce(booster, values, "sum")
    expected = (2, [1.5, 4.5], 2.5, 7, 5) if plugin == "zero" else (1, [1.0, 3.0], 2.0, 3, 2)
    assert (
        size,
        means["loss"].tolist(),
        means["seen"][0].item(),
        sums["hits"].item(),
        sums["seen"][0].item(),
    ) == expected


REPLICAS = {"single": 1, "hybrid-tp": 1, "hybrid-pp": 1}
"""Ranks with samples of their own, where it is not both."""


@matrix(["single", "hybrid-tp"], name=NAMES)
def test_gradients_and_losses_are_those_of_one_large_batch(name):
    assert_equals_one_large_batch(plugin_named(name), 1 if name == "single" else 2, REPLICAS.get(name, 2))


PIPELINE = {"pp_size": 2, "custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": {"x": torch.ones(2, 8)}}
UNEVEN = {
    **runs("ddp", "fsdp", "gemini", "hybrid-dp"),
    "zero": RUNS["zero2"],
    "hybrid-pp": Setting(HybridParallelPlugin, PIPELINE, 4),
}


@matrix(["zero"], name=UNEVEN)
def test_steps_follow_the_ranks_that_have_batches(name):
    plugin = UNEVEN[name].plugin(**UNEVEN[name].options)
    assert_steps_follow_batches(plugin, UNEVEN[name].num_ranks, in_pipeline=name == "hybrid-pp")


@on_ranks(2)
def test_evaluation_ends_together():
    booster, model, _, index = boosted(LowLevelZeroPlugin(stage=2))
    model.eval()
    with torch.no_grad():
        assert sum(len(model(x)) for x in join(booster, iter(batches_of(index)))) == 10
