"""A plugin made of `booster_zero.gathering` alone passes the kit; by default what sharded values can change."""

from collections.abc import Mapping
from typing import Any, ClassVar

from gathering_plugin import GatheringPlugin
from kit_cases import by_default

from booster_testing.conformance import PluginConformance


@by_default(
    "test_equals_one_process[adamw]",
    "test_equals_one_process[muon]",
    "test_clips_by_the_global_norm[0.05-2.0]",
    "test_low_precision_equals_one_process[fp16]",
    "test_resumed_run_continues_exactly[bf16]",
    "test_checkpoint_of_one_device_loads[bf16]",
    "test_loads_at_another_world_size",
)
class TestGathering(PluginConformance):
    plugin_class = GatheringPlugin
    options: ClassVar[Mapping[str, Any]] = {"max_prefetch": 2}
