from booster_core.plugin.single import SingleDevicePlugin
from booster_testing.conformance import PluginConformance


class TestSingleDevice(PluginConformance):
    plugin_class = SingleDevicePlugin
    world_size = 1
