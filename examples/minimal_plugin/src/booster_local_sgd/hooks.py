"""The entry point through which Booster finds the plugin."""

from __future__ import annotations

from booster_core import hookimpl
from booster_local_sgd.plugin import LocalSGDPlugin


@hookimpl
def booster_plugins() -> list[type[LocalSGDPlugin]]:
    """Return the plugins of this package."""
    return [LocalSGDPlugin]
