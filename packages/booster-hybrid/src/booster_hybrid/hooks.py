"""The entry point through which `booster_core.discovery` finds this package's plugin."""

from __future__ import annotations

from booster_core.plugin import hookimpl
from booster_hybrid.plugin import HybridParallelPlugin


@hookimpl
def booster_plugins() -> list[type[HybridParallelPlugin]]:
    """Return the plugin that this package brings."""
    return [HybridParallelPlugin]
