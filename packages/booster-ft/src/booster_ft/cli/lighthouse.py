"""Start the lighthouse at which replica groups of ft meet.

It is torchft's. It holds no state of the run: restart it at the same address, and groups go on.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import click

from booster_ft.config import require_torchft

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def start_lighthouse(bind: str, min_replicas: int, *, join_timeout: float, heartbeat_timeout: float = 5.0) -> Any:
    """Return torchft's server, which runs until its ``shutdown``."""
    require_torchft()
    from torchft.coordination import LighthouseServer

    milliseconds = round(1000 * join_timeout), round(1000 * heartbeat_timeout)
    return LighthouseServer(bind, min_replicas, milliseconds[0], heartbeat_timeout_ms=milliseconds[1])


@click.command(context_settings={"show_default": True})
@click.option("--bind", default="[::]:29510", help="Address and port; port 0 takes a free one.")
@click.option("--min-replicas", type=click.IntRange(min=1), default=1, help="Groups that a step needs.")
@click.option("--join-timeout", type=float, default=60.0, help="Seconds for which groups wait for others that live.")
@click.option("--heartbeat-timeout", type=float, default=5.0, help="Seconds after which a silent group is dead.")
def command(*, bind: str, min_replicas: int, join_timeout: float, heartbeat_timeout: float) -> None:
    """Start the lighthouse, and print the value of TORCHFT_LIGHTHOUSE for all groups."""
    server = start_lighthouse(bind, min_replicas, join_timeout=join_timeout, heartbeat_timeout=heartbeat_timeout)
    click.echo(f"TORCHFT_LIGHTHOUSE={server.address()}")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()


def run_groups(
    num_groups: int, command: Sequence[str], variables: Mapping[str, str], *, min_replicas: int, join_timeout: float
) -> None:
    """Start a lighthouse and, for each group, a command, and wait for them: `booster run --groups`.

    Raises:
        click.ClickException: If torchft can't be imported, or a group fails for good.
    """
    server = start_lighthouse("[::]:0", min_replicas, join_timeout=join_timeout)
    shared = {**variables, "TORCHFT_LIGHTHOUSE": server.address(), "NUM_REPLICA_GROUPS": str(num_groups)}
    started = [
        subprocess.Popen(command, env={**shared, "REPLICA_GROUP_ID": str(group)})  # noqa: S603 - the user's own script
        for group in range(num_groups)
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
