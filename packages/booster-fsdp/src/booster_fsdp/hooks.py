"""The entry point through which `booster_core.discovery` finds this package's plugin."""

from __future__ import annotations

from booster_core.plugin import hookimpl
from booster_fsdp.plugin import TorchFSDPPlugin


@hookimpl
def booster_plugins() -> list[type[TorchFSDPPlugin]]:
    """Return the plugins of this package."""
    return [TorchFSDPPlugin]
