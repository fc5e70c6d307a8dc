"""Run a script on several ranks, with a plugin chosen here.

torchrun starts the ranks; `booster_core.run_settings` hands the settings to the script's ``Booster()``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from importlib_metadata import entry_points

from booster_core.ranks import environments
from booster_core.run_settings import RunSettings, settings_options

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNT = click.IntRange(min=1)
_LAUNCHERS = "booster.launchers"
"""Group of entry points; that of the name ``groups`` starts replica groups."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--nproc", metavar="N", type=_COUNT, help="Ranks a host.  [default: GPUs, or 1]")
@click.option("--hosts", metavar="A,B,...", help="Hosts of the run: start this on each.")
@click.option("--max-restarts", metavar="N", type=click.IntRange(min=0), help="Of ranks that fail.  [default: 0]")
@click.option("--groups", metavar="N", type=_COUNT, help="Replica groups, for plugin ft.")
@click.option("--min-replicas", metavar="N", type=_COUNT, help="Groups a step needs.  [default: 1]")
@click.option("--join-timeout", metavar="S", type=float, help="Wait for live groups.  [default: 60]")
@settings_options
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    *,
    nproc: int | None,
    hosts: str | None,
    max_restarts: int | None,
    groups: int | None,
    min_replicas: int | None,
    join_timeout: float | None,
    settings: RunSettings,
    script: tuple[str, ...],
) -> None:
    """Run SCRIPT with its arguments on several ranks, by torchrun.

    What SCRIPT itself passes to Booster wins. Arguments of SCRIPT that are named as options here go after `--`. Under
    SLURM, `srun --ntasks-per-node=1 booster run ...` runs on all nodes of the step; srun may also start each rank.
    """
    if not Path(script[0]).is_file():
        msg = f"No file '{script[0]}'. The script comes before its own arguments."
        raise click.UsageError(msg)
    variables = {**os.environ, **settings.environment()}
    if groups is not None:
        launcher = [*_torchrun(["--standalone"], nproc or 1, 100 if max_restarts is None else max_restarts)]
        run = [sys.executable, *launcher, "--monitor-interval=0.5", *script]
        run_groups = _launcher_of_groups(hosts)
        run_groups(groups, run, variables, min_replicas=min_replicas or 1, join_timeout=join_timeout or 60.0)
        return
    if min_replicas is not None or join_timeout is not None:
        msg = "`--min-replicas` and `--join-timeout` are of replica groups. Say how many, by `--groups`."
        raise click.UsageError(msg)
    run = [sys.executable, *_launcher(nproc, hosts, max_restarts), *script]
    os.execve(sys.executable, run, variables)  # noqa: S606 - the user's own script


def _launcher_of_groups(hosts: str | None) -> Callable[..., None]:
    if hosts is not None:
        msg = "`--groups` starts groups on this host. On others, start one by torchrun: see `booster lighthouse`."
        raise click.UsageError(msg)
    for entry in entry_points(group=_LAUNCHERS, name="groups"):
        run_groups: Callable[..., None] = entry.load()
        return run_groups
    msg = "`--groups` needs booster-ft. Run `pip install booster-ft`."
    raise click.UsageError(msg)


def _launcher(nproc: int | None, hosts: str | None, max_restarts: int | None) -> list[str]:
    """Return what starts the ranks of this host: torchrun with its options, or nothing where ``srun`` starts each."""
    step = environments.slurm_step()
    if step is not None and step.num_tasks > step.num_nodes:
        if (nproc, hosts, max_restarts) != (None, None, None):
            msg = (
                f"srun started {step.num_tasks} tasks on {step.num_nodes} node(s), which are the ranks. Leave out "
                "`--nproc`, `--hosts` and `--max-restarts`, or start one task on each node by "
                "`srun --ntasks-per-node=1`."
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

        nproc = max(1, torch.accelerator.device_count())
    if names:
        num_hosts, head, run = len(names), names[0], "booster"
    elif step is not None:
        num_hosts, head, run = step.num_nodes, f"{step.first_node}:{step.port}", step.name
    else:
        num_hosts, head, run = 1, "", ""
    places = [f"--nnodes={num_hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={head}", f"--rdzv-id={run}"]
    where = places if num_hosts > 1 else ["--standalone"]
    return _torchrun(where, nproc, max_restarts)


def _torchrun(where: list[str], nproc: int, max_restarts: int | None) -> list[str]:
    restarts = [] if max_restarts is None else [f"--max-restarts={max_restarts}"]
    return ["-m", "torch.distributed.run", *where, f"--nproc-per-node={nproc}", *restarts]
