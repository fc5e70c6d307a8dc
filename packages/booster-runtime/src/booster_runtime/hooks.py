"""What this distribution does in a run, through the hooks that core offers to every distribution."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from booster_core.plugin import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_core.ranks import Monitor, World


@hookimpl
def before_launch(backend: str) -> None:
    """Set up the log, and let torch record collectives."""
    from booster_core.log import configure_log
    from booster_runtime.watch.flight_recorder import keep_flight_record

    configure_log()
    keep_flight_record(os.environ, backend)


@hookimpl
def watch_ranks(
    world: World,
    hosts: Sequence[str] | None,
    address: str,
    error_file: str | None,
) -> Monitor | None:
    """Connect this rank to the monitor, so that all ranks end when one fails."""
    from booster_runtime.watch import start_monitor

    monitor = start_monitor(world, hosts, address, may_end_process=True, error_file=error_file)
    if world.unwatched_because is not None:
        msg = (
            f"No monitor watches rank {world.rank} ({world.unwatched_because}): if a rank dies, this one waits for it "
            f"for {world.timeout_seconds:g} s. Check that the hosts accept each other's connections on any port, or "
            "set BOOSTER_MONITOR=0 on every rank to run without it."
        )
        warnings.warn(msg, RuntimeWarning, stacklevel=2)
    return monitor
