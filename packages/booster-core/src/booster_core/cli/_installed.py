"""Verbs that other distributions bring: the entry-point group ``booster.commands``.

An entry point's name is the verb. It names a module that defines ``command``, a click command, and whose docstring
starts with a summary. The summary is read from the source text; the module is imported when its verb runs.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from booster_core.plugin.hooks import distribution_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

    from importlib_metadata import EntryPoint

COMMAND_GROUP = "booster.commands"


def summary(entries: list[EntryPoint]) -> str:
    """Return the summary of a verb for ``booster --help``: the first line of its module's docstring, or the problem."""
    if len(entries) > 1:
        return _doubled(entries)
    spec = _find_spec(entries[0].module)
    if spec is None:
        return f"Cannot be loaded: No module named '{entries[0].module}'"
    try:
        tree = ast.parse(Path(spec.origin or "").read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return f"Cannot be loaded: {type(error).__name__}: {error}"
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module without importing the packages around it, as `importlib.util.find_spec` would."""
    locations: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full_name = ".".join(parts[:count])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        found = (find(full_name, locations) for find in finders if find is not None)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return None
        locations = spec.submodule_search_locations
    return spec


def load(verb: str, entries: list[EntryPoint]) -> click.Command:
    """Import the module of a verb and return its command.

    Raises:
        click.ClickException: If several distributions bring the verb, its module can't be imported, or has no command.
    """
    if len(entries) > 1:
        msg = f"Verb '{verb}': {_doubled(entries)}"
        raise click.ClickException(msg)
    entry = entries[0]
    whose = f"Verb '{verb}' ({distribution_of(entry)})"
    try:
        command = getattr(importlib.import_module(entry.module), "command", None)
    except (Exception, SystemExit) as error:
        # A third party's module may fail in any way, exit included.
        msg = f"{whose} could not be imported: {type(error).__name__}: {error}"
        raise click.ClickException(msg) from error
    if not isinstance(command, click.Command):
        msg = f"{whose} has no click command named `command` in its module '{entry.module}'."
        raise click.ClickException(msg)
    return command


def _doubled(entries: list[EntryPoint]) -> str:
    return f"Several distributions bring it: {', '.join(map(distribution_of, entries))}. Uninstall all but one."
