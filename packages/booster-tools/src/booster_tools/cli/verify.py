"""Train under a plugin and in one process, and compare.

The work is in `booster_tools.verification`, on ranks that torchrun starts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click


@click.command()
@click.argument("build", metavar="FILE:FUNCTION")
@click.option("--plugin", required=True, help="Name of an installed plugin.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="An argument of the plugin; repeatable.")
@click.option("--batch", default="batch", show_default=True, help="Function of the same file that makes the batch.")
@click.option("--loss", help="Function of the same file: loss(outputs, batch).  [default: the outputs' own loss]")
@click.option("--nproc", default=2, show_default=True, help="Number of ranks on this machine.")
@click.option("--steps", default=2, show_default=True, help="Number of training steps.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16", "pure-bf16"]),
    help="As for Booster.  [default: by the model]",
)
def command(
    *,
    build: str,
    plugin: str,
    options: tuple[str, ...],
    batch: str,
    loss: str | None,
    nproc: int,
    steps: int,
    precision: str | None,
) -> None:
    """Train a script's model under a plugin and in one process, and say where the two differ.

    FILE:FUNCTION, such as `train.py:build`, names a function that returns (model, optimizer); others of that file
    return the whole batch and, if need be, compute the loss. The exit status is 1 where outputs, losses, gradients
    or updates differ by more than rounding.
    """
    file = build.rpartition(":")[0]
    if not Path(file).is_file():  # which ranks would tell after half a minute
        msg = f"No file '{file}', of '{build}'. Pass FILE:FUNCTION, such as `train.py:build`."
        raise click.UsageError(msg)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    # torchrun follows an exit status by a traceback of its own, in which the verdict would be lost.
    folder = tempfile.mkdtemp(prefix="booster-verify-")
    status = Path(folder) / "status"
    rank = [
        "-m",
        "booster_tools.cli._verify_rank",
        str(status),
        build,
        batch,
        loss or "",
        plugin,
        str(steps),
        precision or "",
        *options,
    ]
    try:
        returned = subprocess.run([*torchrun, *rank], check=False).returncode  # noqa: S603 - our own module
        raise SystemExit(returned or int(status.read_text(encoding="ascii")))
    finally:
        shutil.rmtree(folder)
