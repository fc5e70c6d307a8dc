"""The entry point through which `booster_core.discovery` finds this package's plugin."""

from __future__ import annotations

from booster_core.plugin import hookimpl
from booster_ddp.plugin import TorchDDPPlugin


@hookimpl
def booster_plugins() -> list[type[TorchDDPPlugin]]:
    """Return the plugins of this package."""
    return [TorchDDPPlugin]
