"""The ``booster`` command: one module of this package for each verb, and those that other distributions bring.

A verb's module defines ``command``; the first line of its docstring is the summary. It is imported when its verb runs,
so that ``booster --help`` stays quick. Modules whose names start with ``_`` are not verbs.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import Any

import click

from booster_core.cli import _installed
from booster_core.errors import BoosterError
from booster_core.plugin.hooks import entry_points_by_name


class _Verbs(click.Group):
    """A group whose commands are the modules of this package, and those of the group ``booster.commands``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs, without importing them."""
        del ctx
        return sorted({*_own_verbs(), *entry_points_by_name(_installed.COMMAND_GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a verb and return its command; another distribution cannot replace a verb of core."""
        del ctx
        if cmd_name in _own_verbs():
            command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
            return command
        entries = entry_points_by_name(_installed.COMMAND_GROUP).get(cmd_name)
        return None if entries is None else _installed.load(cmd_name, entries)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb, whose errors are told without a traceback."""
        try:
            return super().invoke(ctx)
        except BoosterError as error:
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs with the first lines of their modules' docstrings, read without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in self.list_commands(ctx)])


def _own_verbs() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]


def _summary(verb: str) -> str:
    if verb not in _own_verbs():
        return _installed.summary(entry_points_by_name(_installed.COMMAND_GROUP)[verb])
    text = pkgutil.get_data(__name__, f"{verb}.py") or b""
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="booster-core", prog_name="booster")
def main() -> None:
    """Look at plugins, machines and checkpoints of Booster."""
