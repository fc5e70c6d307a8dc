from booster_core.testing.conformance import PluginConformance
from booster_zero import LowLevelZeroPlugin


class TestStage1(PluginConformance):
    plugin_class = LowLevelZeroPlugin


class TestStage2WithTinyBuckets(PluginConformance):
    plugin_class = LowLevelZeroPlugin
    options = {"stage": 2, "bucket_bytes": 256}
