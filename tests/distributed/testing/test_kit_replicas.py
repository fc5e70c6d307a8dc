"""The conformance kit detects replicas that differ; the first plugin here is correct, each other has one fault."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from booster_core.plugin import API_VERSION, Capability, ModelWrapper, OptimizerWrapper, Plugin
from booster_core.plugin.replicated import place_model
from booster_runtime.state.replicated import ReplicatedStateAdapter
from booster_testing.conformance import PluginConformance


class _AveragingOptimizer(OptimizerWrapper):
    averages = True

    def update_parameters(self, closure=None):
        if self.averages:
            for gradient in self.gradients():
                dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        return super().update_parameters(closure)


class AveragingPlugin(Plugin):
    """Average gradients before the step: correct data parallelism."""

    name = "averaging"
    api_version = API_VERSION
    capabilities: ClassVar = frozenset(
        {Capability.CPU, Capability.FP32, Capability.DATA_PARALLEL, Capability.SYNCHRONOUS}
    )
    optimizer_class: ClassVar = _AveragingOptimizer

    def configure(self, objects, context):
        place_model(objects.model, objects.optimizer, context.device, context.precision)
        optimizer = self.optimizer_class(objects.optimizer, precision=context.precision)
        return objects._replace(model=ModelWrapper(objects.model, precision=context.precision), optimizer=optimizer)


class _LocalOptimizer(_AveragingOptimizer):
    averages = False


class WithoutAveraging(AveragingPlugin):
    optimizer_class: ClassVar = _LocalOptimizer


class _OffByOneRoundingOptimizer(_AveragingOptimizer):
    def step(self, closure=None):
        result = super().step(closure)
        if dist.get_rank() == 1:  # in one element, by one unit in the last place
            weight = self.param_groups[0]["params"][0].data.view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
        return result


class OffByOneRounding(AveragingPlugin):
    optimizer_class: ClassVar = _OffByOneRoundingOptimizer


class _OwnersOnly(ReplicatedStateAdapter):
    def model_shards(self):
        return (shard for shard in super().model_shards() if shard.is_owner)


class DriftOutsideOfShards(OffByOneRounding):
    """List only the shards that a rank owns, as strategies that shard their state do."""

    def state_adapter(self, model, optimizer, context):
        return _OwnersOnly(model, optimizer, context.coordinator)


def _kit_for(plugin):
    kit = type("Kit", (PluginConformance,), {"plugin_class": plugin})
    return kit()


def test_equal_replicas_pass():
    _kit_for(AveragingPlugin).test_ranks_hold_equal_parameters()


@pytest.mark.parametrize("plugin", [WithoutAveraging, OffByOneRounding])
def test_differing_parameters_are_named(plugin):
    with pytest.raises(AssertionError, match=r"differ between ranks: .*embedding\.weight.* \(ranks 0 and 1\)"):
        _kit_for(plugin).test_ranks_hold_equal_parameters()


def test_difference_that_no_shard_shows_is_found_in_the_outputs():
    with pytest.raises(AssertionError, match="Ranks 0 and 1 compute different outputs from the same batch"):
        _kit_for(DriftOutsideOfShards).test_ranks_hold_equal_parameters()
