"""The ``booster`` command, whose verbs are the entry points of the group ``booster.commands``, core's own among them.

An entry point's name is the verb; it refers to a click command, and the docstring of its module starts with a summary.
The summary is read from the source text, and the module is imported when its verb runs, so that ``booster --help``
stays quick.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from booster_core.errors import BoosterError
from booster_core.plugin.hooks import distribution_of, entry_points_by_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

    from importlib_metadata import EntryPoint

COMMAND_GROUP = "booster.commands"


class _Verbs(click.Group):
    """A group whose commands are found by entry point."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs, without importing them."""
        del ctx
        return sorted(entry_points_by_name(COMMAND_GROUP))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb and return its command.

        Raises:
            click.ClickException: If several distributions bring it, it can't be imported, or is no command.
        """
        del ctx
        entries = entry_points_by_name(COMMAND_GROUP).get(cmd_name)
        return None if entries is None else _load(cmd_name, entries)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb, whose errors of ours are told without a traceback."""
        try:
            return super().invoke(ctx)
        except BoosterError as error:
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs with the first lines of their modules' docstrings, read without importing them."""
        del ctx
        with formatter.section("Commands"):
            verbs = sorted(entry_points_by_name(COMMAND_GROUP).items())
            formatter.write_dl([(name, _summary(entries)) for name, entries in verbs])


def _load(verb: str, entries: list[EntryPoint]) -> click.Command:
    if len(entries) > 1:
        msg = f"Verb '{verb}': {_doubled(entries)}"
        raise click.ClickException(msg)
    whose = f"Verb '{verb}' ({distribution_of(entries[0])})"
    try:
        command = entries[0].load()
    except (Exception, SystemExit) as error:
        # A third party's module may fail in any way, exit included.
        msg = f"{whose} could not be imported: {type(error).__name__}: {error}"
        raise click.ClickException(msg) from error
    if not isinstance(command, click.Command):
        msg = f"{whose} is no click command: '{entries[0].value}'."
        raise click.ClickException(msg)
    return command


def _summary(entries: list[EntryPoint]) -> str:
    """Return the first line of the docstring of a verb's module, or the problem."""
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


def _doubled(entries: list[EntryPoint]) -> str:
    return f"Several distributions bring it: {', '.join(map(distribution_of, entries))}. Uninstall all but one."


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="booster-core", prog_name="booster")
def main() -> None:
    """Run trainings, plan and check them, and look at plugins, machines and checkpoints."""
