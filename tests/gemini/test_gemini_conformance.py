from collections.abc import Mapping
from typing import Any, ClassVar

from kit_cases import VariantConformance, slow_cases

from booster_gemini import GeminiPlugin
from booster_testing.conformance import PluginConformance


class TestInOneChunk(VariantConformance):
    plugin_class = GeminiPlugin
    reduces_under_no_sync = True  # gradients are kept in shards only


@slow_cases(
    "test_resumed_run_continues_exactly[fp32]",
    "test_resumed_run_continues_exactly[bf16]",
    "test_checkpoint_of_one_device_loads[fp32]",
    "test_checkpoint_of_one_device_loads[fp16]",
)
class TestInTinyChunks(PluginConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {"min_chunk_bytes": 256, "max_prefetch": 2}
    reduces_under_no_sync = True  # gradients are kept in shards only


class TestWholeParametersWithoutOverlap(VariantConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {
        "partition": "parameter",
        "overlap_communication": False,
        "min_chunk_bytes": 1024,
        "max_prefetch": 0,
    }
    reduces_under_no_sync = True  # gradients are kept in shards only


@slow_cases(
    "test_equals_one_process[sgd]",
    "test_equals_one_process[adamw]",
    "test_equals_one_process[adafactor]",
    "test_resumed_run_continues_exactly",
)
class TestTwoReplicas(VariantConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {"replica_size": 2, "min_chunk_bytes": 1024}
    world_size = 4
    other_world_size = 2
