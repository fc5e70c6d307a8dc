"""Run the conformance kit of booster-testing: it tests each capability that the plugin declares."""

from __future__ import annotations

from booster_local_sgd import LocalSGDPlugin
from booster_testing.conformance import PluginConformance


class TestConformance(PluginConformance):
    plugin_class = LocalSGDPlugin
    options = {"sync_every": 2}
