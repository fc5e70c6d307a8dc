from collections.abc import Mapping
from typing import Any, ClassVar

from booster_core.testing.conformance import PluginConformance
from booster_hybrid import HybridParallelPlugin


class TestDataParallelAlone(PluginConformance):
    plugin_class = HybridParallelPlugin


class TestZero2(PluginConformance):
    plugin_class = HybridParallelPlugin
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 2}
