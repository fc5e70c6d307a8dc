"""The hook relay: the hooks of all distributions that observe or extend Booster, found once per process.

Hooks come from installed distributions (entry-point group ``booster.hooks``) and from objects registered by
`register_hooks`. A distribution whose hooks cannot be loaded is reported and left out.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata
import pluggy

from booster_core.errors import PluginError
from booster_core.plugin import hookspecs

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint
    from pluggy import HookRelay

HOOK_GROUP = "booster.hooks"


def hook_relay() -> HookRelay:
    """Return the relay on which Booster calls its hooks, such as ``hook_relay().after_step(...)``.

    The first call loads the hooks of installed distributions; a broken one is warned about, by distribution and cause.
    """
    return _manager().hook


def register_hooks(hooks: object) -> None:
    """Add an object (or module) whose methods are marked with `booster_core.hookimpl`.

    Args:
        hooks: Its marked methods are called from now on, after those registered before.

    Raises:
        PluginError: If nothing in it is marked, a marked name is no hook of Booster, an argument is unknown, or the
            object is registered already.

    Collective: none; hooks are called on the ranks that register them.
    """
    _register(_manager(), hooks)


def unregister_hooks(hooks: object) -> None:
    """Remove an object that `register_hooks` added.

    Raises:
        PluginError: If it is not registered.
    """
    manager = _manager()
    if not manager.is_registered(hooks):
        msg = f"{hooks!r} is not registered as hooks."
        raise PluginError(msg)
    manager.unregister(hooks)


def entry_points_by_name(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group, without importing anything; of a name used twice there are several.

    The metadata of all distributions is read once, and again when a folder of ``sys.path`` has changed, as by pip.
    """
    found: defaultdict[str, list[EntryPoint]] = defaultdict(list)
    for entry in _entry_points(group, tuple((folder, _changed_at(folder)) for folder in sys.path)):
        found[entry.name].append(entry)
    return dict(found)


@functools.lru_cache(maxsize=8)
def _entry_points(group: str, folders: tuple[tuple[str, object], ...]) -> tuple[EntryPoint, ...]:  # noqa: ARG001
    return tuple(importlib_metadata.entry_points(group=group))


def _changed_at(folder: str) -> object:
    try:
        status = Path(folder).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def distribution_of(entry: EntryPoint) -> str:
    """Return the name and version of an entry point's distribution, for messages."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"


def new_manager() -> pluggy.PluginManager:
    """Return a pluggy manager with Booster's hook specifications and no implementations."""
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    return manager


@functools.cache
def _manager() -> pluggy.PluginManager:
    manager = new_manager()
    for entry in itertools.chain.from_iterable(entry_points_by_name(HOOK_GROUP).values()):
        try:
            _register(manager, entry.load())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a third party's module may fail in any way
            msg = (
                f"The hooks '{entry.name}' ({distribution_of(entry)}) are left out, because they could not be loaded: "
                f"{type(error).__name__}: {error}"
            )
            warnings.warn(msg, stacklevel=3)
    return manager


def _register(manager: pluggy.PluginManager, hooks: object) -> None:
    if manager.is_registered(hooks):
        msg = f"{hooks!r} is registered already."
        raise PluginError(msg)
    # pluggy registers the valid half of a half-wrong object; a trial manager raises before anything is registered.
    trial = new_manager()
    try:
        trial.register(hooks)
        trial.check_pending()
    except pluggy.PluginValidationError as error:
        msg = f"{hooks!r} cannot be used as hooks: {' '.join(str(error).split())}"
        raise PluginError(msg) from error
    if not trial.get_hookcallers(hooks):
        msg = f"{hooks!r} has no function marked with `booster_core.hookimpl`."
        raise PluginError(msg)
    manager.register(hooks)
