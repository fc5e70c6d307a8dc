"""Propose a sharding policy for a script's model, and check it against one process on ranks of this machine.

The policy is found in one forward of the model; see `booster_hybrid.proposing`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click


@click.command()
@click.argument("build", metavar="FILE:FUNCTION")
@click.option("--batch", default="batch", show_default=True, help="Function of the same file that makes the batch.")
@click.option("--nproc", default=2, show_default=True, help="Number of ranks on this machine; 1 checks nothing.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the policy's code to this file.")
def command(*, build: str, batch: str, nproc: int, out: Path | None) -> None:
    """Propose a sharding policy for a script's model, and check it against one process on ranks of this machine.

    FILE:FUNCTION, such as `train.py:build`, names a function that returns (model, optimizer) or (model, optimizer,
    criterion); another one of that file returns the whole batch, as for `booster verify-plugin`. Prints the policy as
    code, and which layers it leaves whole. The exit status is 1 where a training with it differs from one process, and
    2 where nothing can be proposed.
    """
    from booster_core.errors import BoosterError
    from booster_hybrid.proposing.proposal import propose
    from booster_tools.verification import function_of, module_of

    try:
        file, _, function = build.partition(":")
        module = module_of(Path(file))
        made = function_of(module, function or "build", file)()
        model = made[0] if isinstance(made, tuple) else made
        found = propose(model, function_of(module, batch, file)(), max(nproc, 2))
    except (BoosterError, TypeError) as error:
        click.echo(f"booster policy: {error}", err=True)
        raise SystemExit(2) from None
    click.echo(found.code)
    click.echo(f"\nThe policy splits {found.share:.0%} of the parameters.")
    if found.whole:
        click.echo("These stay whole on every rank:")
        for reason in dict.fromkeys(found.whole.values()):
            names = ", ".join(name for name, each in found.whole.items() if each == reason)
            click.echo(f"  {names}: {reason}")
    if out is not None:
        out.write_text(f"{found.code}\n", encoding="utf-8")
    if nproc > 1:
        raise SystemExit(_verified(f"{found.code}\n", f"{file}:{function or 'build'}", batch, nproc))


def _verified(code: str, build: str, batch: str, nproc: int) -> int:
    """Train under the policy, as its code says, and in one process; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "proposed_policy.py"
        path.write_text(code, encoding="utf-8")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        rank = ["-m", "booster_hybrid.cli._policy_rank", build, batch, str(path)]
        return subprocess.run([*torchrun, *rank], check=False).returncode  # noqa: S603 - our own module
