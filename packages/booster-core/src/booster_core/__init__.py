"""Booster: one call makes a PyTorch training script distributed; the strategy is a plugin.

Public names are imported when they are first used, so that importing this package costs next to nothing by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.lazy_import import public_names

if TYPE_CHECKING:
    from booster_core.booster import Booster
    from booster_core.checkpoint_io import CheckpointIO
    from booster_core.plugin import BoostContext, Boosted, Capability, PipelinePlugin, Plugin, hookimpl
    from booster_core.precision import LossScaleConfig, PrecisionPolicy
    from booster_core.ranks import DistCoordinator
    from booster_core.ranks.launch import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch, shutdown

    __version__: str

__all__ = [
    "BoostContext",
    "Boosted",
    "Booster",
    "Capability",
    "CheckpointIO",
    "DistCoordinator",
    "LossScaleConfig",
    "PipelinePlugin",
    "Plugin",
    "PrecisionPolicy",
    "hookimpl",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "shutdown",
]

_import, _names = public_names(__name__)


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("booster-core")
    return _import(name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*_names(), "__version__"})
