"""One of the ranks that ``booster policy`` starts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from booster_core import launch_from_torch
from booster_core.errors import BoosterError
from booster_hybrid.plugin import HybridParallelPlugin
from booster_tools.verification import function_of, module_of, verify


def main(build: str, batch: str, policy: str) -> int:
    """Verify the policy of a file, print the result on the first rank, and return the exit status.

    Collective: every rank of the world.
    """
    coordinator = launch_from_torch()
    try:
        file, _, function = build.partition(":")
        module = module_of(Path(file))
        made = function_of(module, function, file)
        plugin = HybridParallelPlugin(tp_size=coordinator.world_size, custom_policy=module_of(Path(policy)).policy)
        report = verify(made, plugin, function_of(module, batch, file)())
    except (BoosterError, TypeError) as error:
        if coordinator.is_master():
            click.echo(f"booster policy: {error}", err=True)
        return 2
    if coordinator.is_master():
        click.echo(str(report))
    return 1 if report.unexplained else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
