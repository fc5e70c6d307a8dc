"""Run a training script in several replica groups on this machine, each restarted by itself when it fails.

Across machines, start a lighthouse by `booster lighthouse`, and each group by torchrun with `TORCHFT_LIGHTHOUSE`,
`REPLICA_GROUP_ID` and `NUM_REPLICA_GROUPS` set.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click

from booster_core.run_settings import RunSettings, settings_options

_AT_LEAST_1 = click.IntRange(min=1)


@click.command(context_settings={"ignore_unknown_options": True, "show_default": True})
@click.option("--groups", type=_AT_LEAST_1, default=2, help="Number of replica groups.")
@click.option("--nproc", type=_AT_LEAST_1, default=1, help="Ranks in each group.")
@click.option("--min-replicas", type=_AT_LEAST_1, default=1, help="Groups that a step needs.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=100, help="Of each group.")
@click.option("--join-timeout", type=float, default=60.0, help="Seconds to wait for groups that live.")
@settings_options
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    *,
    groups: int,
    nproc: int,
    min_replicas: int,
    max_restarts: int,
    join_timeout: float,
    settings: RunSettings,
    script: tuple[str, ...],
) -> None:
    """Run SCRIPT, with its arguments, in several replica groups.

    Starts a lighthouse and, for each group, torchrun, which starts the group again when it fails.
    """
    from booster_ft.cli.lighthouse import start_lighthouse

    server = start_lighthouse("[::]:0", min_replicas, join_timeout=join_timeout)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    torchrun += [f"--max-restarts={max_restarts}", "--monitor-interval=0.5"]
    shared = {
        **os.environ,
        **settings.environment(),
        "TORCHFT_LIGHTHOUSE": server.address(),
        "NUM_REPLICA_GROUPS": str(groups),
    }
    started = [
        subprocess.Popen(  # noqa: S603 - the user's own script
            [sys.executable, *torchrun, *script], env={**shared, "REPLICA_GROUP_ID": str(group)}
        )
        for group in range(groups)
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = [str(group) for group, process in enumerate(started) if process.wait()]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        server.shutdown()
    if failed:
        msg = f"Replica group(s) {', '.join(failed)} failed."
        raise click.ClickException(msg)
