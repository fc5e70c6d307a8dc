"""The conformance kit on the simulated accelerator, with collectives by NCCL's rules."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from simulated_device import BACKEND, NAME

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_testing.conformance import ArithmeticConformance, PluginConformance
from booster_testing.pipeline_conformance import EXAMPLE_BATCH, PipelineConformance
from booster_zero import LowLevelZeroPlugin

pytestmark = [pytest.mark.usefixtures("on_device"), pytest.mark.slow]


class OnDevice:
    device = NAME
    backend = BACKEND


class TestDDP(OnDevice, PluginConformance):
    plugin_class = TorchDDPPlugin


class TestFSDP(OnDevice, PluginConformance):
    plugin_class = TorchFSDPPlugin


class TestZero1(OnDevice, PluginConformance):
    plugin_class = LowLevelZeroPlugin


class TestZero2InSmallBucketsOffloaded(OnDevice, ArithmeticConformance):
    plugin_class = LowLevelZeroPlugin
    options: ClassVar[Mapping[str, Any]] = {"stage": 2, "offload": "cpu", "bucket_bytes": 1024}
    reduces_under_no_sync = True


class TestGemini(OnDevice, PluginConformance):
    plugin_class = GeminiPlugin
    reduces_under_no_sync = True
    options: ClassVar[Mapping[str, Any]] = {"min_chunk_bytes": 256, "max_prefetch": 2}


class TestGeminiOffloaded(OnDevice, ArithmeticConformance):
    plugin_class = GeminiPlugin
    reduces_under_no_sync = True
    options: ClassVar[Mapping[str, Any]] = {
        "min_chunk_bytes": 1024,
        "offload_param_frac": 1.0,
        "offload_optim_frac": 1.0,
    }


class TestGeminiWithinABudget(OnDevice, ArithmeticConformance):
    plugin_class = GeminiPlugin
    reduces_under_no_sync = True
    options: ClassVar[Mapping[str, Any]] = {
        "min_chunk_bytes": 1024,
        "placement_policy": "auto",
        "memory_budget_bytes": 20_000,
    }


class TestHybrid(OnDevice, PluginConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 1}


_PIPELINE: dict[str, Any] = {
    "pp_size": 2,
    "custom_policy": ShardingPolicy(layers=("layers",)),
    "example_batch": EXAMPLE_BATCH,
}


class TestPipeline(OnDevice, PipelineConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = _PIPELINE


class TestInterleavedPipeline(OnDevice, PipelineConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {**_PIPELINE, "pp_style": "interleaved"}


class TestZeroBubblePipelinesWithZero2(OnDevice, PipelineConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {**_PIPELINE, "pp_style": "zbv", "zero_stage": 2}
    world_size = 4
    data_size = 2
