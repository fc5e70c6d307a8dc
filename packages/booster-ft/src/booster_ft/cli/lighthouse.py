"""Start the lighthouse at which replica groups of the plugin ft meet.

It is torchft's. It holds no state of the run: restart it at the same address, and groups go on.
"""

from __future__ import annotations

import threading
from typing import Any

import click

from booster_core.errors import BoosterError


def start_lighthouse(bind: str, min_replicas: int, *, join_timeout: float, heartbeat_timeout: float = 5.0) -> Any:
    """Return torchft's server, which runs until its ``shutdown``.

    Raises:
        click.ClickException: If torchft can't be imported.
    """
    from booster_ft.config import require_torchft

    try:
        require_torchft()
    except BoosterError as error:
        raise click.ClickException(str(error)) from error
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
