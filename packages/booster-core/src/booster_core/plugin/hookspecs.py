"""The hooks through which third parties observe and extend Booster, as pluggy specifications.

An implementation is marked with `hookimpl` and reaches Booster through the entry-point group ``booster.hooks`` or
`booster_core.plugin.register_hooks`; only ``booster_plugins`` belongs to the group ``booster.plugins``. A hook
takes only the arguments it names, so that a specification can gain arguments without breaking older implementations.
Observing hooks run on every rank and must not call collectives unless every rank does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from booster_core.booster import Booster
    from booster_core.plugin.interface import BoostContext, Boosted, Plugin
    from booster_core.ranks.world import Monitor, World

PROJECT_NAME = "booster"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def booster_plugins() -> Sequence[type[Plugin]]:  # type: ignore[empty-body]
    """Return the plugin classes of a module in the entry-point group ``booster.plugins``."""


@hookspec
def before_launch(backend: str) -> None:
    """Check this distribution's own settings before the process group is opened with a backend."""


@hookspec(firstresult=True)
def watch_ranks(world: World, hosts: Sequence[str] | None, address: str, error_file: str | None) -> Monitor | None:
    """Start a monitor of the ranks of a world that is being opened; ``None`` to pass. Collective: every rank.

    ``hosts`` are the names of all ranks' hosts, on rank 0; ``address`` is a name of rank 0's host. Where torchrun's
    agent expects the reason of a failure in a file, that is ``error_file``. Not called where the user has turned
    watching off.
    """


@hookspec
def before_configure(plugin: Plugin, objects: Boosted, context: BoostContext) -> None:
    """Observe the checked arguments of ``boost`` before the plugin configures them."""


@hookspec
def after_configure(booster: Booster, plugin: Plugin, boosted: Boosted, context: BoostContext) -> None:
    """Observe the boosted objects before ``boost`` returns them."""


@hookspec
def before_save(kind: str, checkpoint: Path) -> None:
    """Observe a save before it starts.

    ``kind`` is ``"model"``, ``"lora"``, ``"optimizer"``, ``"lr_scheduler"`` or ``"checkpoint"``.
    """


@hookspec
def after_save(kind: str, checkpoint: Path) -> None:
    """Observe a save after it is complete on disk; for an asynchronous one, after its writing ended."""


@hookspec
def before_load(kind: str, checkpoint: Path) -> None:
    """Observe a load before anything is read."""


@hookspec
def after_load(kind: str, checkpoint: Path) -> None:
    """Observe a load after every value is in place."""


@hookspec
def after_step(optimizer: Optimizer, metrics: Mapping[str, Any]) -> None:
    """Observe an optimizer step; ``metrics`` holds values such as ``"grad_norm"``."""


@hookspec(firstresult=True)
def sharding_policy(model_class: type[nn.Module]) -> object | None:
    """Return how a model class is split over tensor parallel ranks and cut into stages, or ``None`` to pass."""


@hookspec(firstresult=True)
def storage(scheme: str) -> object | None:
    """Return the storage that reads and writes URLs of a scheme such as ``"s3"``, or ``None`` to pass."""
