"""Check a checkpoint: checksums against its manifest, headers against its index, and sizes.

The work is in `booster_checkpoint.tools.inspection`; torch is imported when it starts.
"""

from __future__ import annotations

import click

from booster_core.errors import BoosterError


@click.command()
@click.argument("path")
def command(*, path: str) -> None:
    """Check PATH: checksums against its manifest, headers against its index, and sizes.

    PATH is as for `booster inspect`. The exit status is 1 if anything is wrong.
    """
    from booster_checkpoint.storage import path_at
    from booster_checkpoint.tools.inspection import verify

    try:
        problems, checked = verify(path_at(path))
    except BoosterError as error:  # no storage for a URL
        raise click.ClickException(str(error)) from error
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        raise SystemExit(1)
    click.echo(f"{path}: whole (checked {checked})")
