"""Check a checkpoint: checksums against its manifest, headers against its index, and sizes.

The work is in `booster_runtime.checkpoint.tools.inspection`; torch is imported when it starts.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def command(*, path: Path) -> None:
    """Check PATH: checksums against its manifest, headers against its index, and sizes.

    PATH is as for `booster inspect`. The exit status is 1 if anything is wrong.
    """
    from booster_runtime.checkpoint.tools.inspection import verify

    problems, checked = verify(path)
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        raise SystemExit(1)
    click.echo(f"{path}: whole (checked {checked})")
