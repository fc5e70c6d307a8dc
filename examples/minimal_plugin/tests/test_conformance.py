"""Core's conformance kit, inherited: it tries each capability that the plugin declares."""

from __future__ import annotations

from booster_core.testing.conformance import PluginConformance
from booster_local_sgd import LocalSGDPlugin


class TestConformance(PluginConformance):
    plugin_class = LocalSGDPlugin
    options = {"sync_every": 2}
