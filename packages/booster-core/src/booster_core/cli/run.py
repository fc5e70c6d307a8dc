"""Run a training script on several ranks, with a plugin and precision chosen here.

torchrun starts the ranks; `booster_core.run_settings` hands the settings to the script's ``Booster()``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from booster_core.ranks import environments
from booster_core.run_settings import RunSettings, settings_options


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks on each host.  [default: its GPUs, or 1]")
@click.option("--hosts", metavar="A,B,...", help="Hosts of the run: start this on each.")
@settings_options
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
def command(*, nproc: int | None, hosts: str | None, settings: RunSettings, script: tuple[str, ...]) -> None:
    """Run SCRIPT with its arguments on several ranks, by torchrun.

    What SCRIPT itself passes to Booster wins. Arguments of SCRIPT that are named as options here go after `--`. Under
    SLURM, `srun --ntasks-per-node=1 booster run ...` runs on all nodes of the step; srun may also start each rank.
    """
    if not Path(script[0]).is_file():
        msg = f"No file '{script[0]}'. The script comes before its own arguments."
        raise click.UsageError(msg)
    launcher = _launcher(nproc, hosts)
    variables = {**os.environ, **settings.environment()}
    os.execve(sys.executable, [sys.executable, *launcher, *script], variables)  # noqa: S606 - the user's own script


def _launcher(nproc: int | None, hosts: str | None) -> list[str]:
    """Return what starts the ranks of this host: torchrun with its options, or nothing where ``srun`` starts each."""
    step = environments.slurm_step()
    if step is not None and step.num_tasks > step.num_nodes:
        if nproc is not None or hosts is not None:
            msg = (
                f"srun started {step.num_tasks} tasks on {step.num_nodes} node(s), which are the ranks. Leave out "
                "`--nproc` and `--hosts`, or start one task on each node by `srun --ntasks-per-node=1`."
            )
            raise click.UsageError(msg)
        return []
    names = [name for name in (hosts or "").split(",") if name]
    if step is None and not names and environments.num_nodes_of_job() > 1:
        msg = (
            f"This job has {environments.num_nodes_of_job()} nodes, of which only this one would be used. Start "
            "`srun --ntasks-per-node=1 booster run ...`, or name this host alone by `--hosts`."
        )
        raise click.UsageError(msg)
    if nproc is None:
        import torch

        nproc = max(1, torch.cuda.device_count())
    if names:
        num_hosts, head, run = len(names), names[0], "booster"
    elif step is not None:
        num_hosts, head, run = step.num_nodes, f"{step.first_node}:{step.port}", step.name
    else:
        num_hosts, head, run = 1, "", ""
    places = [f"--nnodes={num_hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={head}", f"--rdzv-id={run}"]
    where = places if num_hosts > 1 else ["--standalone"]
    return ["-m", "torch.distributed.run", *where, f"--nproc-per-node={nproc}"]
