"""The entry point through which `booster_core.discovery` finds this package's plugin."""

from __future__ import annotations

from booster_core.plugin import hookimpl
from booster_gemini.plugin import GeminiPlugin


@hookimpl
def booster_plugins() -> list[type[GeminiPlugin]]:
    """Return the plugin that this package brings."""
    return [GeminiPlugin]
