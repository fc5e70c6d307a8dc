from collections.abc import Mapping
from typing import Any, ClassVar

from kit_parts import arithmetic_by_default

from booster_testing.conformance import PluginConformance
from booster_zero import LowLevelZeroPlugin


class TestStage1(PluginConformance):
    plugin_class = LowLevelZeroPlugin


class TestStage2WithTinyBuckets(PluginConformance):
    plugin_class = LowLevelZeroPlugin
    options: ClassVar[Mapping[str, Any]] = {"stage": 2, "bucket_bytes": 256}
    reduces_under_no_sync = True  # gradients are kept in shards only


@arithmetic_by_default
class TestWholeParametersWithoutOverlap(PluginConformance):
    plugin_class = LowLevelZeroPlugin
    options: ClassVar[Mapping[str, Any]] = {
        "partition": "parameter",
        "overlap_communication": False,
        "bucket_bytes": 1024,
    }
    shares_calls = False


@arithmetic_by_default
class TestTwoReplicas(PluginConformance):
    plugin_class = LowLevelZeroPlugin
    options: ClassVar[Mapping[str, Any]] = {"stage": 2, "replica_size": 2, "bucket_bytes": 1024}
    world_size = 4
    other_world_size = 2
    shares_calls = False
