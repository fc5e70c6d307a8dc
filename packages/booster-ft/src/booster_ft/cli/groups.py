"""What `booster run --groups` starts: replica groups on this machine, each restarted by itself when it fails."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import click

from booster_ft.cli.lighthouse import start_lighthouse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def run_groups(
    num_groups: int, command: Sequence[str], variables: Mapping[str, str], *, min_replicas: int, join_timeout: float
) -> None:
    """Start a lighthouse and, for each group, a command, and wait for them.

    Args:
        num_groups: Number of groups.
        command: What starts the ranks of a group.
        variables: The command's environment.
        min_replicas: Groups that a step needs.
        join_timeout: Seconds for which groups wait for others that live.

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
