"""The plugin that the mutants are made from passes the conformance kit, so what a mutant fails is its own fault."""

from booster_testing.conformance import PluginConformance
from booster_testing.mutants import ReferencePlugin


class TestReference(PluginConformance):
    plugin_class = ReferencePlugin
