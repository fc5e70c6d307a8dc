"""Verbs that other distributions bring: the entry-point group ``booster.commands``.

An entry point is named as its verb, and names a module that is made as core's own verbs are: it defines ``command``, a
click command, and says in the first line of its docstring what it does. It is listed from its source text, and
imported when its verb runs.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import TYPE_CHECKING

import click
import importlib_metadata

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

COMMAND_GROUP = "booster.commands"


def installed_verbs() -> dict[str, list[EntryPoint]]:
    """Return the entry points by verb, without importing anything; of a doubled verb there are several.

    Collective: none.
    """
    found: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry in importlib_metadata.entry_points(group=COMMAND_GROUP):
        found[entry.name].append(entry)
    return dict(found)


def summary(entries: list[EntryPoint]) -> str:
    """Return what ``booster --help`` says of a verb: the first line of its module's docstring, or what is wrong."""
    if len(entries) > 1:
        return _doubled(entries)
    from booster_core.plugin.plugin_source import PluginSource, SourceError

    try:
        return PluginSource().docstring(entries[0].module).partition("\n")[0]
    except SourceError as error:
        return f"Cannot be loaded: {error}"


def load(verb: str, entries: list[EntryPoint]) -> click.Command:
    """Import the module of a verb and return its command.

    Raises:
        click.ClickException: If several distributions bring the verb, its module can't be imported, or has no command.

    Collective: none.
    """
    if len(entries) > 1:
        msg = f"Verb '{verb}': {_doubled(entries)}"
        raise click.ClickException(msg)
    from booster_core.plugin.hooks import distribution_of

    entry = entries[0]
    whose = f"Verb '{verb}' ({distribution_of(entry)})"
    try:
        command = getattr(importlib.import_module(entry.module), "command", None)
    except (Exception, SystemExit) as error:
        # A stranger's module may fail in any way, exit included.
        msg = f"{whose} could not be imported: {type(error).__name__}: {error}"
        raise click.ClickException(msg) from error
    if not isinstance(command, click.Command):
        msg = f"{whose} has no click command named `command` in its module '{entry.module}'."
        raise click.ClickException(msg)
    return command


def _doubled(entries: list[EntryPoint]) -> str:
    from booster_core.plugin.hooks import distribution_of

    return f"Several distributions bring it: {', '.join(map(distribution_of, entries))}. Uninstall all but one."
