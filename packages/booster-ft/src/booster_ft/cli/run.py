"""Run a training script in several replica groups on this machine, each restarted by itself when it fails.

Across machines, start a lighthouse by `booster lighthouse`, and each group by torchrun with `TORCHFT_LIGHTHOUSE`,
`REPLICA_GROUP_ID` and `NUM_REPLICA_GROUPS` set.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import click

from booster_core.errors import BoosterError

_POLL_SECONDS = 0.2
_END_SECONDS = 10


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--groups", type=click.IntRange(min=1), default=2, show_default=True, help="Number of replica groups.")
@click.option(
    "--nproc-per-group", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks in each group."
)
@click.option(
    "--min-replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Groups that a step needs."
)
@click.option("--max-restarts", type=click.IntRange(min=0), default=100, show_default=True, help="Of each group.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    *, groups: int, nproc_per_group: int, min_replicas: int, max_restarts: int, script: tuple[str, ...]
) -> None:
    """Run SCRIPT, with its arguments, in several replica groups.

    Starts a lighthouse and, for each group, torchrun. A group that fails is started again, and catches up.
    """
    from booster_ft.groups import require_torchft

    try:
        require_torchft()
    except BoosterError as error:
        raise click.ClickException(str(error)) from error
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=min_replicas, join_timeout_ms=10_000)
    shared = {**os.environ, "TORCHFT_LIGHTHOUSE": server.address(), "NUM_REPLICA_GROUPS": str(groups)}
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc_per_group}")

    def start(group: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - the user's own script
            [sys.executable, *torchrun, *script], env={**shared, "REPLICA_GROUP_ID": str(group)}
        )

    running = {group: start(group) for group in range(groups)}
    restarts = dict.fromkeys(running, 0)
    failed: list[int] = []
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        while running:
            time.sleep(_POLL_SECONDS)
            for group, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[group]
                if code and restarts[group] < max_restarts:
                    restarts[group] += 1
                    click.echo(
                        f"Replica group {group} ended with exit code {code}; start {restarts[group] + 1}.", err=True
                    )
                    running[group] = start(group)
                elif code:
                    failed.append(group)
    except KeyboardInterrupt:
        failed.extend(running)
    finally:
        _end(running.values())
        server.shutdown()
    if failed:
        msg = f"Replica group(s) {', '.join(map(str, sorted(failed)))} failed."
        raise click.ClickException(msg)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end(processes: object) -> None:
    """Ask processes to end, and kill those that don't."""
    started: list[subprocess.Popen[bytes]] = list(processes)  # type: ignore[call-overload]
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
