from collections.abc import Mapping
from typing import Any, ClassVar

from kit_parts import arithmetic_by_default

from booster_gemini import GeminiPlugin
from booster_testing.conformance import PluginConformance


@arithmetic_by_default
class TestInOneChunk(PluginConformance):
    plugin_class = GeminiPlugin
    reduces_under_no_sync = True  # gradients are kept in shards only
    shares_calls = False


class TestInTinyChunks(PluginConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {"min_chunk_bytes": 256, "max_prefetch": 2}
    reduces_under_no_sync = True  # gradients are kept in shards only


@arithmetic_by_default
class TestWholeParametersWithoutOverlap(PluginConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {
        "partition": "parameter",
        "overlap_communication": False,
        "min_chunk_bytes": 1024,
        "max_prefetch": 0,
    }
    reduces_under_no_sync = True  # gradients are kept in shards only
    shares_calls = False


@arithmetic_by_default
class TestTwoReplicas(PluginConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {"replica_size": 2, "min_chunk_bytes": 1024}
    world_size = 4
    other_world_size = 2
    shares_calls = False
