from collections.abc import Mapping
from typing import Any, ClassVar

from kit_cases import VariantConformance, slow_cases

from booster_testing.conformance import PluginConformance
from booster_zero import LowLevelZeroPlugin


class TestStage1(VariantConformance):
    plugin_class = LowLevelZeroPlugin


@slow_cases("test_resumed_run_continues_exactly[bf16]", "test_resumed_run_continues_exactly[fp16]")
class TestStage2WithTinyBuckets(PluginConformance):
    plugin_class = LowLevelZeroPlugin
    options: ClassVar[Mapping[str, Any]] = {"stage": 2, "bucket_bytes": 256}
    reduces_under_no_sync = True  # gradients are kept in shards only


class TestWholeParametersWithoutOverlap(VariantConformance):
    plugin_class = LowLevelZeroPlugin
    options: ClassVar[Mapping[str, Any]] = {
        "partition": "parameter",
        "overlap_communication": False,
        "bucket_bytes": 1024,
    }


@slow_cases(
    "test_equals_one_process[sgd]",
    "test_equals_one_process[adamw]",
    "test_equals_one_process[muon]",
    "test_resumed_run_continues_exactly",
)
class TestTwoReplicas(VariantConformance):
    plugin_class = LowLevelZeroPlugin
    options: ClassVar[Mapping[str, Any]] = {"stage": 2, "replica_size": 2, "bucket_bytes": 1024}
    world_size = 4
    other_world_size = 2
