"""One of the ranks that ``booster verify`` starts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from booster_core import launch_from_torch
from booster_core.errors import BoosterError
from booster_core.plugin import load
from booster_core.run_settings import option_value
from booster_tools.verification import verify
from booster_tools.verification.script import functions_of


def main(build: str, batch: str, loss: str, plugin: str, steps: str, precision: str, *options: str) -> int:
    """Verify, print the result on the first rank, and return the exit status.

    Collective: every rank of the world.
    """
    coordinator = launch_from_torch()
    try:
        functions = functions_of(build, batch, loss or None)
        options_by_name = dict(map(option_value, options))
        report = verify(functions, load(plugin)(**options_by_name), int(steps), mixed_precision=precision or None)
    except (BoosterError, TypeError) as error:
        if coordinator.is_master():
            click.echo(f"booster verify: {error}", err=True)
        return 2
    if coordinator.is_master():
        click.echo(str(report))
    return 1 if report.unexplained else 0


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(str(main(*sys.argv[2:])), encoding="ascii")
