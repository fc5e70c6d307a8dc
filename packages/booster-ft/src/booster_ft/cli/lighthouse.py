"""Start the lighthouse at which replica groups of the plugin ft meet.

It is torchft's. It holds no state of the run: restart it at the same address, and groups go on.
"""

from __future__ import annotations

import threading

import click

from booster_core.errors import BoosterError


@click.command()
@click.option("--bind", default="[::]:29510", show_default=True, help="Address and port; port 0 takes a free one.")
@click.option(
    "--min-replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Groups that a step needs."
)
@click.option(
    "--join-timeout", type=click.FloatRange(min=0.1), default=60.0, show_default=True,
    help="Seconds for which groups that have ended a step wait for others that are alive.",
)  # fmt: skip
@click.option(
    "--heartbeat-timeout", type=click.FloatRange(min=0.5), default=5.0, show_default=True,
    help="Seconds after which a group that gives no sign counts as dead.",
)  # fmt: skip
def command(*, bind: str, min_replicas: int, join_timeout: float, heartbeat_timeout: float) -> None:
    """Start the lighthouse, and print the value of TORCHFT_LIGHTHOUSE for all groups."""
    from booster_ft.groups import require_torchft

    try:
        require_torchft()
    except BoosterError as error:
        raise click.ClickException(str(error)) from error
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=bind,
        min_replicas=min_replicas,
        join_timeout_ms=round(1000 * join_timeout),
        heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
    )
    click.echo(f"TORCHFT_LIGHTHOUSE={server.address()}")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()
