"""The beginning of the watch: rank 0 starts the server, every rank connects to it, and all wait until they have."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from booster_core.ranks import PROGRESS
from booster_runtime.watch.member import MonitorMember
from booster_runtime.watch.server import Server
from booster_runtime.watch.sockets import keep_from_children, outlast_interruptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_core.ranks import World

_CONNECT_SECONDS = 10.0
_ALL_SECONDS = 20.0
_LOOPBACK = "127.0.0.1"


def start_monitor(
    world: World,
    hosts: Sequence[str] | None,
    address: str,
    *,
    may_end_process: bool,
    error_file: str | None = None,
) -> MonitorMember | None:
    """Connect this rank to the monitor, which rank 0 starts.

    Args:
        world: The world to watch over; ``unwatched_because`` tells why this rank has no monitor.
        hosts: Host of each rank, on rank 0; not read elsewhere.
        address: The name of rank 0's host by which the other ranks reach it.
        may_end_process: Whether this process ends when another rank fails.
        error_file: Where torchrun's agent expects the reason of a failure.

    Returns:
        The monitor; ``None`` where this rank could not reach it, and in a world of one.

    Collective: every rank of the world.
    """
    from torch.distributed import DistStoreError

    PROGRESS.clear()
    store = world.store
    if world.world_size == 1 or store is None:
        return None
    server = None
    if world.rank == 0:
        assert hosts is not None
        server, news = _start_server(world, hosts, address)
        store.set("monitor", json.dumps(news))
    where = json.loads(store.get("monitor"))
    monitor, connection, problem = None, None, where.get("problem")
    if problem is None:
        connection, problem = _connect(_LOOPBACK if server else where["address"], where["port"], world.timeout_seconds)
    if connection is not None:
        options: dict[str, Any] = {"may_end_process": may_end_process, "error_file": error_file}
        monitor = MonitorMember(world, connection, where["token"], server=server, **options)
        if not monitor.wait_for_welcome():
            problem = "rank 0 did not answer in time, or did not let it in"
    # A failure would miss ranks that come later.
    if store.add("monitored", 1) == world.world_size:
        store.set("all monitored", "")
    with contextlib.suppress(DistStoreError):  # a late one is watched from when it comes
        store.wait(["all monitored"], timedelta(seconds=min(_ALL_SECONDS, world.timeout_seconds)))
    world.unwatched_because = problem
    if problem is None:
        return monitor
    if monitor is not None:
        monitor.close()
    elif server is not None:
        server.close()
    return None


def _start_server(world: World, hosts: Sequence[str], address: str) -> tuple[Server | None, dict[str, Any]]:
    """Return the server, started, and what the others are told of it: where it is, or why there is none."""
    is_one_host, token = len({*hosts}) == 1, secrets.token_hex(16)
    try:
        server = Server(hosts, token, _LOOPBACK if is_one_host else "", timeout_seconds=world.timeout_seconds)
    except OSError as error:
        return None, {"problem": f"rank 0 could not start it: {error}"}
    server.start()
    return server, {"address": _LOOPBACK if is_one_host else address, "port": server.port, "token": token}


def _connect(address: str, port: int, timeout_seconds: float) -> tuple[socket.socket | None, str | None]:
    """Return a connection to the server, or why there is none."""
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        return None, f"it could not be reached at {address}:{port}: {error}"
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the last words of a process come in time
    outlast_interruptions(connection, timeout_seconds)
    keep_from_children(connection)
    return connection, None
