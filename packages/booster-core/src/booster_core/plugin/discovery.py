"""Which plugins are installed, and loading exactly one of them.

Plugins are listed from the metadata of installed distributions (entry-point group ``booster.plugins``) and from their
source text, so a listing imports none of them. Loading imports the one that is asked for, through pluggy; unknown,
doubled, broken and incompatible plugins are reported by name, and never disturb another one. Hooks of third parties
(group ``booster.hooks``) are the business of `booster_core.plugin.hooks`.
"""

from __future__ import annotations

import difflib
import inspect
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import importlib_metadata

from booster_core.errors import PluginError, PluginNotInstalledError
from booster_core.plugin.hooks import distribution_of, hook_relay, new_manager, register_hooks, unregister_hooks
from booster_core.plugin.interface import API_VERSION, Plugin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from importlib_metadata import EntryPoint

    from booster_core.plugin.plugin_source import ClassFacts, PluginSource

__all__ = [
    "PluginListing",
    "hook_relay",
    "installed",
    "load",
    "plugin_class",
    "register_hooks",
    "unregister_hooks",
]

PLUGIN_GROUP = "booster.plugins"

WITHOUT_VERSION = (
    "does not say which version of the plugin interface it was written for: its class needs a line such as "
    f"`api_version = {API_VERSION}`, with a number of its own"
)

_OURS = {
    "TorchDDPPlugin": ("ddp", "booster-ddp"),
    "TorchFSDPPlugin": ("fsdp", "booster-fsdp"),
    "LowLevelZeroPlugin": ("zero", "booster-zero"),
    "GeminiPlugin": ("gemini", "booster-gemini"),
    "HybridParallelPlugin": ("hybrid", "booster-hybrid"),
}
"""Class names that people bring along, with the plugin and the distribution that each is found in."""


@dataclass(frozen=True, kw_only=True)
class PluginListing:
    """What can be said of an installed plugin without importing it.

    Args:
        name: Name of the entry point, as in ``Booster(plugin=name)``.
        distribution: Name of the distribution that brings it.
        version: Version of that distribution.
        entry_point: What the entry point refers to: a module.
        class_name: Name of the plugin's class; ``None`` where only importing it would tell.
        capabilities: Values of its `Capability` set, sorted; ``None`` where only importing it would tell.
        available: Whether it trains in this version, as far as its source tells.
        problem: Why it cannot be loaded; ``None`` where nothing speaks against it.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    class_name: str | None = None
    capabilities: tuple[str, ...] | None = None
    available: bool = True
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def installed() -> list[PluginListing]:
    """List the installed plugins, sorted by name, without importing any of them (nor torch).

    Returns:
        One listing for each entry point: of two distributions that use one name, both, each with the problem.

    Collective: none.
    """
    from booster_core.plugin.plugin_source import PluginSource

    source = PluginSource()
    by_name = _entry_points_by_name()
    return [_listing(entry, by_name[name], source) for name in sorted(by_name) for entry in by_name[name]]


def names_of_plugins() -> set[str]:
    """Return the names of installed plugins and of our own, installed or not.

    Collective: none.
    """
    return {*_entry_points_by_name(), *(name for name, _ in _OURS.values())}


def load(name: str) -> type[Plugin]:
    """Import the plugin of a name, and no other, and return its class.

    Args:
        name: Name of an entry point in the group ``booster.plugins``.

    Raises:
        PluginError: If no plugin or more than one has that name, if importing it fails (the cause is chained), if its
            module has no class of that name, or if that was written for another version of the plugin interface, or
            does not itself say for which.

    Collective: none; every rank loads for itself.
    """
    by_name = _entry_points_by_name()
    entries = by_name.get(name)
    if entries is None:
        raise PluginError(_unknown(name, by_name))
    entry = entries[0]
    plugin = f"Plugin '{name}' ({distribution_of(entry)})"
    if len(entries) > 1:
        msg = f"{_doubled(name, entries)} Uninstall all but one."
        raise PluginError(msg)
    manager = new_manager()
    try:
        manager.register(entry.load())
        manager.check_pending()
        classes = [found for result in manager.hook.booster_plugins() for found in result]
    except (Exception, SystemExit) as error:
        # A stranger's module may fail in any way, exit included; whichever it is, it is this plugin that is broken.
        msg = f"{plugin} could not be imported: {_cause(error)}"
        raise PluginError(msg) from error
    if not classes:
        msg = (
            f"{plugin} lists no class: '{entry.value}' needs a function `booster_plugins`, marked with "
            "`booster_core.hookimpl`, that returns a list of Plugin classes."
        )
        raise PluginError(msg)
    return _checked(name, plugin, entry.value, classes)


def plugin_class(class_name: str) -> type[Plugin]:
    """Return the class of an installed plugin by the name of the class, importing only that plugin.

    Args:
        class_name: Name of the class, such as ``"GeminiPlugin"``.

    Raises:
        PluginNotInstalledError: If it is a class of one of Booster's own distributions, which is not installed.
        PluginError: If it is installed, but cannot be loaded.
        AttributeError: If no installed plugin has a class of that name.

    Collective: none.
    """
    # Python and test tools probe modules for all sorts of names, and no class is spelt like those.
    listings = installed() if class_name[:1].isupper() else []
    for listing in listings:
        if listing.class_name == class_name:
            return load(listing.name)
    own_name, distribution = _OURS.get(class_name, (None, ""))
    for listing in listings:
        if listing.class_name is None:
            try:
                found = load(listing.name)
            except PluginError:
                if listing.name == own_name:
                    raise
                continue  # somebody else's plugin is broken; that is no answer to who asks for this class
            if found.__name__ == class_name:
                return found
    if own_name is not None:
        msg = f"{class_name} is in {distribution}, which is not installed. Run `pip install {distribution}`."
        raise PluginNotInstalledError(msg)
    msg = f"module 'booster_core.plugin' has no attribute '{class_name}', and no installed plugin has such a class"
    raise AttributeError(msg)


def _entry_points_by_name() -> dict[str, list[EntryPoint]]:
    by_name: defaultdict[str, list[EntryPoint]] = defaultdict(list)
    for entry in importlib_metadata.entry_points(group=PLUGIN_GROUP):
        by_name[entry.name].append(entry)
    return dict(by_name)


def _listing(entry: EntryPoint, namesakes: list[EntryPoint], source: PluginSource) -> PluginListing:
    from booster_core.plugin.plugin_source import SourceError

    facts: ClassFacts | None = None
    problem: str | None = None
    try:
        classes = source.plugin_classes(entry.module)
    except SourceError as error:
        problem = str(error)
    else:
        named = [found for found in classes or [] if found.name in (entry.name, None)]
        if classes and not named:
            problem = f"its class is named {', '.join(repr(found.name) for found in classes)}, not '{entry.name}'"
            facts = classes[0]
        elif len(named) == 1:
            facts = named[0]
    if facts is not None and problem is None and facts.api_version not in (API_VERSION, None):
        problem = _wrong_version(facts.api_version)
    if facts is not None and problem is None and not facts.states_api_version:
        problem = WITHOUT_VERSION
    missing = _missing_requirements(entry)
    if problem is None and missing:
        problem = f"needs {', '.join(missing)}, not installed"
    if len(namesakes) > 1:
        problem = _doubled(entry.name, namesakes)
    return PluginListing(
        name=entry.name,
        distribution=entry.dist.name if entry.dist else "unknown",
        version=entry.dist.version if entry.dist else "unknown",
        entry_point=entry.value,
        class_name=facts.class_name if facts else None,
        capabilities=facts.capabilities if facts else None,
        available=facts is None or facts.available is not False,
        problem=problem,
    )


def _missing_requirements(entry: EntryPoint) -> list[str]:
    """Return the names of distributions that the entry point's requires and that are not installed, extras left out."""
    from packaging.requirements import InvalidRequirement, Requirement

    missing = []
    for text in (entry.dist.requires if entry.dist else None) or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # metadata of a stranger's old build tool; importing the plugin will tell
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and not any(True for _ in importlib_metadata.distributions(name=requirement.name)):
            missing.append(requirement.name)
    return missing


def _checked(name: str, plugin: str, value: str, classes: Iterable[object]) -> type[Plugin]:
    """Return the one class of that name, or raise with what was found instead."""
    candidates = list(classes)
    strangers = [found for found in candidates if not (isinstance(found, type) and issubclass(found, Plugin))]
    if strangers:
        msg = f"{plugin} lists {strangers[0]!r}, which is not a subclass of booster_core.Plugin."
        raise PluginError(msg)
    named = [found for found in candidates if getattr(found, "name", None) == name]
    if len(named) != 1:
        names = ", ".join(repr(getattr(found, "name", None)) for found in candidates)
        msg = (
            f"{plugin}: '{value}' lists {len(named)} classes whose `name` is '{name}'; the names there are {names}. "
            "The name of the class and that of the entry point must agree."
        )
        raise PluginError(msg)
    chosen: type[Plugin] = named[0]  # type: ignore[assignment]
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

    Collective: none.
    """
    stated: int | None = getattr(plugin_class, "api_version", None)
    if stated not in (API_VERSION, None):
        msg = f"{plugin} {_wrong_version(stated)}. Install a version of it that matches."
        raise PluginError(msg)
    if stated is None or not (inherits or "api_version" in vars(plugin_class)):
        msg = f"{plugin} {WITHOUT_VERSION}."
        raise PluginError(msg)


def _wrong_version(api_version: int | None) -> str:
    return f"was written for version {api_version} of the plugin interface; this booster-core has version {API_VERSION}"


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


def _cause(error: BaseException) -> str:
    """Return the error's text, with its class where the text alone would not say what happened."""
    return str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
