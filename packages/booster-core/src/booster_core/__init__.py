"""Booster: one call makes a PyTorch training script distributed; the strategy is a plugin.

Public names are imported when they are first used, so that importing this package costs next to nothing by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# The module `launch` and its function share a name: whichever import of the module comes first would hide the function,
# so it happens here, before the function takes the name. The module is light and imports torch where it uses it.
from booster_core.launch import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch

if TYPE_CHECKING:
    from booster_core.booster import Booster
    from booster_core.checkpoint_io import CheckpointIO
    from booster_core.coordinator import DistCoordinator
    from booster_core.hookspecs import hookimpl
    from booster_core.plugin import BoostContext, Boosted, Capability, PipelinePlugin, Plugin
    from booster_core.precision import LossScaleConfig, PrecisionPolicy
    from booster_runtime.activation_checkpointing import (
        disable_activation_checkpointing,
        enable_activation_checkpointing,
    )
    from booster_runtime.lazy import LazyInitContext

    __version__: str

__all__ = [
    "BoostContext",
    "Boosted",
    "Booster",
    "Capability",
    "CheckpointIO",
    "DistCoordinator",
    "LazyInitContext",
    "LossScaleConfig",
    "PipelinePlugin",
    "Plugin",
    "PrecisionPolicy",
    "disable_activation_checkpointing",
    "enable_activation_checkpointing",
    "hookimpl",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

_HOMES = {
    "BoostContext": "booster_core.plugin",
    "Boosted": "booster_core.plugin",
    "Booster": "booster_core.booster",
    "Capability": "booster_core.plugin",
    "CheckpointIO": "booster_core.checkpoint_io",
    "DistCoordinator": "booster_core.coordinator",
    "LazyInitContext": "booster_runtime.lazy",
    "LossScaleConfig": "booster_core.precision",
    "PipelinePlugin": "booster_core.plugin",
    "Plugin": "booster_core.plugin",
    "PrecisionPolicy": "booster_core.precision",
    "disable_activation_checkpointing": "booster_runtime.activation_checkpointing",
    "enable_activation_checkpointing": "booster_runtime.activation_checkpointing",
    "hookimpl": "booster_core.hookspecs",
}
"""Where each of the other public names is defined."""


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use."""
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("booster-core")
    elif name in _HOMES:
        value = getattr(_home(_HOMES[name], name), name)
    else:
        msg = f"module 'booster_core' has no attribute '{name}'"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def _home(module: str, name: str) -> object:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "booster_runtime":
            raise
        msg = f"`{name}` is in booster-runtime, which is not installed. Run `pip install booster-runtime`."
        raise ImportError(msg, name=error.name) from error


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__, "__version__"})
