"""The beginning of the watch: rank 0 starts the server, every rank connects to it, and all wait until they have."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from booster_core.ranks import PROGRESS
from booster_runtime.watch.member import Monitor
from booster_runtime.watch.server import Server
from booster_runtime.watch.sockets import keep_from_children, outlast_interruptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_core.ranks import World

_CONNECT_SECONDS = 10.0
_ALL_SECONDS = 20.0
_LOOPBACK = ("127.", "::1")


def start_monitor(
    world: World,
    hosts: Sequence[str] | None,
    address: str,
    *,
    may_end_process: bool,
    error_file: str | None = None,
) -> Monitor | None:
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
    PROGRESS.clear()
    if world.world_size == 1 or world.store is None:
        return None
    server = None
    if world.rank == 0:
        assert hosts is not None
        server, news = _start_server(world, hosts, address)
        world.store.set("monitor", json.dumps(news))
    else:
        world.store.set(f"monitor/{world.rank}", json.dumps(_addresses_of(address)))
    where = json.loads(world.store.get("monitor"))
    monitor, connection, problem = None, None, where.get("problem")
    if problem is None:
        connection, problem = _connect(where["address"], where["port"], world.timeout_seconds)
    if connection is not None:
        monitor = Monitor(
            world,
            connection,
            where["token"],
            server=server,
            may_end_process=may_end_process,
            error_file=error_file,
        )
        if not monitor.wait_for_welcome():
            problem = f"rank 0 did not answer within {_CONNECT_SECONDS:g} s, or did not let it in"
    _wait_for_all(world)
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
    addresses = ["127.0.0.1"]
    remote = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if remote is not None:
        # The interface by which other hosts reach this one; a host's own name may stand for its loopback here.
        assert world.store is not None
        known = [*json.loads(world.store.get(f"monitor/{remote}")), *_addresses_of(address)]
        addresses = [each for each in dict.fromkeys(known) if not each.startswith(_LOOPBACK)]
    token = secrets.token_hex(16)
    try:
        server = Server(hosts, token, addresses, timeout_seconds=world.timeout_seconds)
    except OSError as error:
        return None, {"problem": f"rank 0 could not start it: {error}"}
    server.start()
    return server, {"address": server.address, "port": server.port, "token": token}


def _addresses_of(host: str) -> list[str]:
    """Return the IP addresses that a host's name stands for here."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


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


def _wait_for_all(world: World) -> None:
    """Let every rank come under watch before any goes on: a failure would miss those that come later."""
    from torch.distributed import DistStoreError

    assert world.store is not None
    if world.store.add("monitored", 1) == world.world_size:
        world.store.set("all monitored", "")
    limit = min(_ALL_SECONDS, world.timeout_seconds)
    with contextlib.suppress(DistStoreError):  # a late one is watched from when it comes
        world.store.wait(["all monitored"], timedelta(seconds=limit))
