from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from kit_cases import VariantConformance, slow_cases

from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_testing.conformance import PluginConformance
from booster_testing.pipeline_conformance import EXAMPLE_BATCH, PipelineConformance


@slow_cases("test_resumed_run_continues_exactly[fp32]", "test_resumed_run_continues_exactly[fp16]")
class TestDataParallelAlone(PluginConformance):
    plugin_class = HybridParallelPlugin


class TestZero2(VariantConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 2}
    reduces_under_no_sync = True  # gradients are kept in shards only


@pytest.mark.slow  # test_hybrid_zero3 compares with one process by default
class TestZero3(PluginConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 3}
    reduces_under_no_sync = True  # gradients are kept in shards only


_PIPELINE: dict[str, Any] = {
    "pp_size": 2,
    "custom_policy": ShardingPolicy(layers=("layers",)),
    "example_batch": EXAMPLE_BATCH,
}


@slow_cases("test_equals_one_process[sgd]")
class TestPipeline(PipelineConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = _PIPELINE


@pytest.mark.slow
class TestZeroBubblePipelinesWithZero2(PipelineConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {**_PIPELINE, "pp_style": "zbv", "zero_stage": 2}
    world_size = 4
    data_size = 2
