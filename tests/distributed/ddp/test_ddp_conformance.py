from typing import ClassVar

from booster_ddp import TorchDDPPlugin
from booster_testing.conformance import PluginConformance


class TestDDP(PluginConformance):
    plugin_class = TorchDDPPlugin


class TestDDPOverOneRank(PluginConformance):
    plugin_class = TorchDDPPlugin
    world_size = 1


class TestDDPWithBucketViews(PluginConformance):
    plugin_class = TorchDDPPlugin
    options: ClassVar = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}
