from collections.abc import Mapping
from typing import Any, ClassVar

from booster_gemini import GeminiPlugin
from booster_testing.conformance import PluginConformance


class TestInOneChunk(PluginConformance):
    plugin_class = GeminiPlugin


class TestInTinyChunks(PluginConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {"min_chunk_bytes": 256, "max_prefetch": 2}


class TestWholeParametersWithoutOverlap(PluginConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {
        "partition": "parameter",
        "overlap_communication": False,
        "min_chunk_bytes": 1024,
        "max_prefetch": 0,
    }


class TestTwoReplicas(PluginConformance):
    plugin_class = GeminiPlugin
    options: ClassVar[Mapping[str, Any]] = {"replica_size": 2, "min_chunk_bytes": 1024}
    world_size = 4
    other_world_size = 2
