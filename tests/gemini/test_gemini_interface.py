from __future__ import annotations

from booster_core import discovery
from booster_gemini import GeminiPlugin


def test_it_is_found_by_name():
    assert discovery.load("gemini") is GeminiPlugin


def test_options_reach_the_config():
    plugin = GeminiPlugin(max_prefetch=3, precision="bf16")
    assert plugin.config.max_prefetch == 3
    assert plugin.precision.name == "bf16"
