from typing import ClassVar

from kit_cases import VariantConformance, slow_cases

from booster_ddp import TorchDDPPlugin
from booster_testing.conformance import PluginConformance


@slow_cases("test_resumed_run_continues_exactly[fp32]", "test_resumed_run_continues_exactly[bf16]")
class TestDDP(PluginConformance):
    plugin_class = TorchDDPPlugin


class TestDDPOverOneRank(VariantConformance):
    plugin_class = TorchDDPPlugin
    world_size = 1


class TestDDPWithBucketViews(VariantConformance):
    plugin_class = TorchDDPPlugin
    options: ClassVar = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}
