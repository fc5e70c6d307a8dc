"""Which plugins are installed, and loading exactly one of them.

Plugins are listed from the metadata of installed distributions (entry-point group ``booster.plugins``), so a listing
imports none of them. Loading imports the one that is asked for, through pluggy; unknown, doubled, broken and
incompatible plugins are reported by name, and never disturb another one.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import importlib_metadata

from booster_core.errors import PluginError, PluginNotInstalledError
from booster_core.plugin.hooks import distribution_of, entry_points_by_name, new_manager
from booster_core.plugin.interface import API_VERSION, Plugin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from importlib_metadata import EntryPoint

PLUGIN_GROUP = "booster.plugins"

_OURS = {
    "TorchDDPPlugin": ("ddp", "booster-ddp"),
    "TorchFSDPPlugin": ("fsdp", "booster-fsdp"),
    "LowLevelZeroPlugin": ("zero", "booster-zero"),
    "GeminiPlugin": ("gemini", "booster-gemini"),
    "HybridParallelPlugin": ("hybrid", "booster-hybrid"),
    "FaultTolerantPlugin": ("ft", "booster-ft"),
}
"""Class names that scripts import, with the plugin and the distribution of each."""


@dataclass(frozen=True, kw_only=True)
class PluginListing:
    """What the metadata of an installed plugin says.

    Args:
        name: Name of the entry point, as in ``Booster(plugin=name)``.
        distribution: Name of the distribution that brings it.
        version: Version of that distribution.
        entry_point: The module that the entry point refers to.
        problem: Why it may fail to load; ``None`` where the metadata shows no problem.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    problem: str | None = None


def installed() -> list[PluginListing]:
    """List the installed plugins, sorted by name, without importing any of them (nor torch).

    Returns:
        One listing for each entry point: of two distributions that use one name, both, each with the problem.
    """
    by_name = entry_points_by_name(PLUGIN_GROUP)
    return [_listing(entry, by_name[name]) for name in sorted(by_name) for entry in by_name[name]]


def names_of_plugins() -> set[str]:
    """Return the names of installed plugins and of our own, installed or not."""
    return {*entry_points_by_name(PLUGIN_GROUP), *(name for name, _ in _OURS.values())}


def load(name: str) -> type[Plugin]:
    """Import the plugin of a name, and no other, and return its class.

    Args:
        name: Name of an entry point in the group ``booster.plugins``.

    Raises:
        PluginError: If no plugin or more than one has that name, if importing it fails (the cause is chained), if its
            module has no class of that name, or if that class does not state this version of the plugin interface.
            The message names requirements of its distribution that are not met.

    Collective: none; every rank loads for itself.
    """
    by_name = entry_points_by_name(PLUGIN_GROUP)
    entries = by_name.get(name)
    if entries is None:
        raise PluginError(_unknown(name, by_name))
    if len(entries) > 1:
        msg = f"{_doubled(name, entries)} Uninstall all but one."
        raise PluginError(msg)
    plugin = f"Plugin '{name}' ({distribution_of(entries[0])})"
    try:
        return _load(name, entries[0], plugin)
    except PluginError as error:
        unmet = _unmet_requirements(entries[0])
        if not unmet:
            raise
        msg = f"{error} It needs {', '.join(unmet)}."
        raise PluginError(msg) from error.__cause__


def load_default() -> type[Plugin]:
    """Return the class of what trains on one device: the plugin named ``single`` where one is installed, else core's.

    booster-runtime brings one that has resumable data loaders, lazy models and adapters.

    Raises:
        PluginError: As `load`.
    """
    from booster_core.plugin.single import SingleDevicePlugin

    is_installed = SingleDevicePlugin.name in entry_points_by_name(PLUGIN_GROUP)
    return load(SingleDevicePlugin.name) if is_installed else SingleDevicePlugin


def plugin_class(class_name: str) -> type[Plugin]:
    """Return the class of an installed plugin by the name of the class.

    Classes of Booster's own distributions are imported alone. For any other name, third parties' plugins are imported
    one after the other until one has it.

    Args:
        class_name: Name of the class, such as ``"GeminiPlugin"``.

    Raises:
        PluginNotInstalledError: If it is a class of one of Booster's own distributions, which is not installed.
        PluginError: If it is installed, but cannot be loaded.
        AttributeError: If no installed plugin has a class of that name.
    """
    by_name = entry_points_by_name(PLUGIN_GROUP)
    if class_name in _OURS:
        name, distribution = _OURS[class_name]
        if name in by_name:
            return load(name)
        msg = f"{class_name} is in {distribution}, which is not installed. Run `pip install {distribution}`."
        raise PluginNotInstalledError(msg)
    for name in sorted(by_name.keys() - dict(_OURS.values()).keys()):
        try:
            found = load(name)
        except PluginError:
            continue  # another distribution's plugin is broken; this says nothing of the class that is asked for
        if found.__name__ == class_name:
            return found
    if class_name == "MoeHybridParallelPlugin":  # of Colossal-AI
        msg = "There is no MoeHybridParallelPlugin: HybridParallelPlugin(ep_size=...) of booster-hybrid stands for it."
        raise AttributeError(msg)
    msg = f"module 'booster_core.plugin' has no attribute '{class_name}', and no installed plugin has such a class"
    raise AttributeError(msg)


def _listing(entry: EntryPoint, namesakes: list[EntryPoint]) -> PluginListing:
    unmet = _unmet_requirements(entry)
    problem = f"needs {', '.join(unmet)}" if unmet else None
    if len(namesakes) > 1:
        problem = _doubled(entry.name, namesakes)
    return PluginListing(
        name=entry.name,
        distribution=entry.dist.name if entry.dist else "unknown",
        version=entry.dist.version if entry.dist else "unknown",
        entry_point=entry.value,
        problem=problem,
    )


def _unmet_requirements(entry: EntryPoint) -> list[str]:
    """Return what the entry point's distribution requires and what is installed instead; extras are left out."""
    from packaging.requirements import InvalidRequirement, Requirement

    unmet = []
    for text in (entry.dist.requires if entry.dist else None) or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # written by an old build tool; importing the plugin will tell
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = next(iter(importlib_metadata.distributions(name=requirement.name)), None)
        # In the order in which people write them: the lower bound first.
        wanted = ",".join(sorted(map(str, requirement.specifier), reverse=True))
        if found is None:
            unmet.append(f"{requirement.name}{wanted}, not installed")
        elif not requirement.specifier.contains(found.version, prereleases=True):
            unmet.append(f"{requirement.name}{wanted}, installed {found.version}")
    return unmet


def _load(name: str, entry: EntryPoint, plugin: str) -> type[Plugin]:
    """Import an entry point's module and return its one class of that name, or raise with what was found instead."""
    manager = new_manager()
    try:
        manager.register(entry.load())
        manager.check_pending()
        classes = [found for result in manager.hook.booster_plugins() for found in result]
    except (Exception, SystemExit) as error:
        # A third party's module may fail in any way, exit included.
        cause = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        msg = f"{plugin} could not be imported: {cause}"
        raise PluginError(msg) from error
    if not classes:
        msg = (
            f"{plugin} lists no class: '{entry.value}' needs a function `booster_plugins`, marked with "
            "`booster_core.hookimpl`, that returns a list of Plugin classes."
        )
        raise PluginError(msg)
    others = [found for found in classes if not (isinstance(found, type) and issubclass(found, Plugin))]
    if others:
        msg = f"{plugin} lists {others[0]!r}, which is not a subclass of booster_core.Plugin."
        raise PluginError(msg)
    named = [found for found in classes if getattr(found, "name", None) == name]
    if len(named) != 1:
        names = ", ".join(repr(getattr(found, "name", None)) for found in classes)
        msg = (
            f"{plugin}: '{entry.value}' lists {len(named)} classes whose `name` is '{name}'; the names there are "
            f"{names}. The name of the class and that of the entry point must agree."
        )
        raise PluginError(msg)
    chosen: type[Plugin] = named[0]
    check_api_version(chosen, plugin, inherits=False)
    if inspect.isabstract(chosen):
        missing = ", ".join(f"`{method}`" for method in sorted(chosen.__abstractmethods__))
        msg = f"{plugin}: {chosen.__name__} does not implement {missing}."
        raise PluginError(msg)
    return chosen


def check_api_version(plugin_class: type[Plugin], plugin: str, *, inherits: bool) -> None:
    """Raise unless a plugin class was written for this version of the interface.

    Args:
        plugin_class: The class.
        plugin: What messages call it.
        inherits: Whether the version may be that of a plugin that the class extends. Installed classes state their own:
            what they inherit would be right whichever version they were written for.

    Raises:
        PluginError: If the version is another one, or is not stated.
    """
    stated: int | None = getattr(plugin_class, "api_version", None)
    if stated not in (API_VERSION, None):
        msg = (
            f"{plugin} was written for version {stated} of the plugin interface; this booster-core has version "
            f"{API_VERSION}. Install a version of it that matches."
        )
        raise PluginError(msg)
    if stated is None or not (inherits or "api_version" in vars(plugin_class)):
        msg = (
            f"{plugin} does not say which version of the plugin interface it was written for: its class needs a line "
            f"such as `api_version = {API_VERSION}`, with a number of its own."
        )
        raise PluginError(msg)


def _doubled(name: str, entries: Iterable[EntryPoint]) -> str:
    owners = " and ".join(distribution_of(entry) for entry in entries)
    return f"The plugin name '{name}' is used by {owners}."


def _unknown(name: str, names: Iterable[str]) -> str:
    known = sorted(names)
    distribution = dict(_OURS.values()).get(name)
    if distribution is not None:
        return f"Plugin '{name}' is in {distribution}, which is not installed. Run `pip install {distribution}`."
    listed = ", ".join(repr(one) for one in known) or "none"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"No plugin named '{name}' is installed. Installed: {listed}.{hint}"
