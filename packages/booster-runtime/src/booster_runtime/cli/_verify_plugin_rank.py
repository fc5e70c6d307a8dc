"""One of the ranks that ``booster verify-plugin`` starts."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from booster_core import launch_from_torch
from booster_core.errors import BoosterError, ConfigError
from booster_core.plugin import load
from booster_runtime.verification import verify

if TYPE_CHECKING:
    from collections.abc import Callable


def main(build: str, batch: str, plugin: str, steps: str, precision: str, *options: str) -> int:
    """Verify, print the result on the first rank, and return the exit status.

    Collective: every rank of the world.
    """
    coordinator = launch_from_torch()
    try:
        file, _, function = build.partition(":")
        module = _module(Path(file))
        made = _function(module, function or "build", file)
        report = verify(
            made,
            load(plugin)(**dict(map(_option, options))),
            _function(module, batch, file)(),
            int(steps),
            mixed_precision=precision or None,
        )
    except (BoosterError, TypeError) as error:
        if coordinator.is_master():
            click.echo(f"booster verify-plugin: {error}", err=True)
        return 2
    if coordinator.is_master():
        click.echo(str(report))
    return 1 if report.unexplained else 0


def _module(path: Path) -> Any:
    if not path.is_file():
        msg = f"No file '{path}'."
        raise ConfigError(msg)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        msg = f"'{path}' is not a Python file."
        raise ConfigError(msg)
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _function(module: Any, name: str, file: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if not callable(found):
        msg = f"'{file}' has no function '{name}'."
        raise ConfigError(msg)
    function: Callable[[], Any] = found
    return function


def _option(text: str) -> tuple[str, Any]:
    """Return the name and value of ``NAME=VALUE``; a value that is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        msg = f"`--option {text}` is not NAME=VALUE."
        raise ConfigError(msg)
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
