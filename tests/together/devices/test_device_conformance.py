"""The conformance kit on the simulated accelerator, with collectives by NCCL's rules."""

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

_LOCAL = {"reduces_under_no_sync": True}
_BUDGET = {"placement_policy": "auto", "memory_budget_bytes": 20_000}
_PIPELINE = {"pp_size": 2, "custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": EXAMPLE_BATCH}
_ZERO_BUBBLE = {**_PIPELINE, "pp_style": "zbv", "zero_stage": 2}
KITS = {
    "TestDDP": (PluginConformance, TorchDDPPlugin, {}, {}),
    "TestFSDP": (PluginConformance, TorchFSDPPlugin, {}, {}),
    "TestZero1": (PluginConformance, LowLevelZeroPlugin, {}, {}),
    "TestZero2InSmallBucketsOffloaded": (
        ArithmeticConformance,
        LowLevelZeroPlugin,
        {"stage": 2, "offload": "cpu", "bucket_bytes": 1024},
        _LOCAL,
    ),
    "TestGemini": (PluginConformance, GeminiPlugin, {"min_chunk_bytes": 256, "max_prefetch": 2}, _LOCAL),
    "TestGeminiOffloaded": (
        ArithmeticConformance,
        GeminiPlugin,
        {"min_chunk_bytes": 1024, "offload_param_frac": 1.0, "offload_optim_frac": 1.0},
        _LOCAL,
    ),
    "TestGeminiWithinABudget": (ArithmeticConformance, GeminiPlugin, {"min_chunk_bytes": 1024, **_BUDGET}, _LOCAL),
    "TestHybrid": (PluginConformance, HybridParallelPlugin, {"zero_stage": 1}, {}),
    "TestPipeline": (PipelineConformance, HybridParallelPlugin, _PIPELINE, {}),
    "TestInterleavedPipeline": (
        PipelineConformance,
        HybridParallelPlugin,
        {**_PIPELINE, "pp_style": "interleaved"},
        {},
    ),
    "TestZeroBubblePipelinesWithZero2": (
        PipelineConformance,
        HybridParallelPlugin,
        _ZERO_BUBBLE,
        {"world_size": 4, "data_size": 2},
    ),
}
"""Of each class: the kit, the plugin, its options, and further settings of the kit."""
for name, (kit, plugin, options, more) in KITS.items():
    settings = {"plugin_class": plugin, "options": options, "device": NAME, "backend": BACKEND, **more}
    globals()[name] = type(name, (kit,), {"__module__": __name__, **settings})
