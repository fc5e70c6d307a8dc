"""What a manifest says of the run that wrote a checkpoint: versions, plugin, ranks, number formats."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import importlib_metadata
import torch

if TYPE_CHECKING:
    from booster_core.plugin import BoostContext, Plugin


def run_facts(plugin: Plugin, context: BoostContext) -> dict[str, Any]:
    """Return the facts of this run as JSON values. Nothing of them is needed to load.

    Collective: none.
    """
    world_size = context.coordinator.world_size
    return {
        "written_by": {
            "booster-core": _version("booster_core"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "plugin": {
            "name": plugin.name,
            "class": f"{type(plugin).__module__}.{type(plugin).__qualname__}",
            "version": _version(type(plugin).__module__.partition(".")[0]),
            "options": {name: repr(value) for name, value in plugin.describe().items()},
        },
        "world_size": world_size,
        "mesh": {"world": world_size, "data_parallel": plugin.data_parallel_coordinates(context.coordinator)[1]},
        "precision": context.precision.describe(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib_metadata.version(package)
    except importlib_metadata.PackageNotFoundError:
        return None
