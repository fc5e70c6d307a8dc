from typing import ClassVar

from kit_parts import arithmetic_by_default

from booster_ddp import TorchDDPPlugin
from booster_testing.conformance import PluginConformance


class TestDDP(PluginConformance):
    plugin_class = TorchDDPPlugin


@arithmetic_by_default
class TestDDPOverOneRank(PluginConformance):
    plugin_class = TorchDDPPlugin
    world_size = 1
    shares_calls = False


@arithmetic_by_default
class TestDDPWithBucketViews(PluginConformance):
    plugin_class = TorchDDPPlugin
    options: ClassVar = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}
    shares_calls = False
