"""What booster-core finds of this package through its entry point."""

from __future__ import annotations

from booster_core.plugin import hookimpl
from booster_ft.plugin import FaultTolerantPlugin


@hookimpl
def booster_plugins() -> list[type[FaultTolerantPlugin]]:
    """Return the plugins of this distribution."""
    return [FaultTolerantPlugin]
