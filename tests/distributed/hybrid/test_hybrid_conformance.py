from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from kit_parts import arithmetic_by_default

from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_testing.conformance import PluginConformance
from booster_testing.pipeline_conformance import EXAMPLE_BATCH, PipelineConformance


class TestDataParallelAlone(PluginConformance):
    plugin_class = HybridParallelPlugin


@arithmetic_by_default
class TestZero2(PluginConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 2}
    reduces_under_no_sync = True  # gradients are kept in shards only
    shares_calls = False


@pytest.mark.slow  # test_hybrid_zero3 compares with one process by default
class TestZero3(PluginConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 3}
    reduces_under_no_sync = True  # gradients are kept in shards only
    shares_calls = False


_PIPELINE: dict[str, Any] = {
    "pp_size": 2,
    "custom_policy": ShardingPolicy(layers=("layers",)),
    "example_batch": EXAMPLE_BATCH,
}


class TestPipeline(PipelineConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = _PIPELINE


@pytest.mark.slow
class TestZeroBubblePipelinesWithZero2(PipelineConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {**_PIPELINE, "pp_style": "zbv", "zero_stage": 2}
    world_size = 4
    data_size = 2
