"""The conformance kit on one replica group of two ranks, which needs no lighthouse."""

from typing import ClassVar

from kit_cases import by_default

from booster_ft import FaultTolerantPlugin
from booster_testing.conformance import PluginConformance


@by_default("test_equals_one_process[adamw]", "test_clips_by_the_global_norm", "test_no_sync_is_allowed")
class TestOneGroup(PluginConformance):
    plugin_class = FaultTolerantPlugin
    options: ClassVar = {"inner": "ddp"}
