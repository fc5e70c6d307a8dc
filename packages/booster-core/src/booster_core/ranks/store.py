"""Opening of the store in which all ranks of a run meet, within a time limit and with an error that names the address.

torch's own client waits without limit for a service that accepts its connection and never answers, and reports each
failed attempt with a C++ stack. Here a plain socket waits until somebody listens, the client runs aside so that its
wait can be given up, and a newcomer makes sure that the store belongs to this run.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from booster_core.errors import LaunchError, MissingRanksError
from booster_core.ranks.rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # torch does not list it as public

_PROBE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_openings = itertools.count()


def open_store(
    url: str, host: str, port: int, *, rank: int, timeout_seconds: float, is_hosted_elsewhere: bool
) -> Store:
    """Open the store of a run.

    Args:
        url: As for ``torch.distributed.rendezvous``: ``tcp://host:port`` or ``env://``.
        host: Host of the store.
        port: Port of the store.
        rank: This process' rank; 0 opens the store unless it is hosted elsewhere.
        timeout_seconds: How long to wait for the store.
        is_hosted_elsewhere: Whether a launcher's agent holds the store.

    Raises:
        LaunchError: If the store cannot be opened or reached in time, or belongs to somebody else.

    Collective: every rank of the run; nobody but rank 0 is waited for.
    """
    deadline = time.monotonic() + timeout_seconds
    address = f"{host}:{port}"
    is_server = rank == 0 and not is_hosted_elsewhere
    if not is_server:
        _wait_for_listener(host, port, deadline, rank, timeout_seconds)
    store = _open_aside(url, address, rank, deadline, timeout_seconds, is_server=is_server)
    # Each rank joins a store once; a launcher's agent may keep one store over restarts, so there a count says nothing.
    key = f"booster/joined/{next(_openings)}/{rank}"
    if not is_hosted_elsewhere and store.add(key, 1) != 1:
        msg = (
            f"rank {rank} has joined the run at {address} already: two processes were started as rank {rank}, or "
            "another run uses this port. Give each process its own rank, and each run its own port."
        )
        raise LaunchError(msg)
    return store


def meet_at_launch(store: Store, address: str, *, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Wait until every rank of the run has opened the store.

    Raises:
        LaunchError: If some ranks do not come in time; the message names them.

    Collective: every rank of the run.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not list it as public

    try:
        Rendezvous(PrefixStore("booster/launch", store), rank, range(world_size)).meet("launch", timeout_seconds)
    except MissingRanksError as error:
        who = str(error).partition(", which")[0].removeprefix("`launch` ")
        msg = (
            f"The run at {address} did not start: {who}. Check that all {world_size} processes were started, with "
            "the same host, port and world size, and that none of them ended with an error."
        )
        raise LaunchError(msg) from error


def _wait_for_listener(host: str, port: int, deadline: float, rank: int, timeout_seconds: float) -> None:
    """Wait until something accepts connections at the address."""
    while True:
        try:
            remaining = max(_PAUSE_SECONDS, min(_PROBE_SECONDS, deadline - time.monotonic()))
            socket.create_connection((host, port), timeout=remaining).close()
        except OSError as error:
            if time.monotonic() + _PAUSE_SECONDS >= deadline:
                msg = (
                    f"Rank {rank} could not reach rank 0 at {host}:{port} within {timeout_seconds:g} s: {error}. Check "
                    "the host name, that rank 0 runs there, and that no firewall closes the port."
                )
                raise LaunchError(msg) from error
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _open_aside(
    url: str, address: str, rank: int, deadline: float, timeout_seconds: float, *, is_server: bool
) -> Store:
    """Let torch open its store in a thread of its own, and give up at the deadline."""
    from torch.distributed import rendezvous  # type: ignore[attr-defined] # torch does not list it as public

    result: dict[str, Any] = {}

    def connect() -> None:
        limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            # A world size of one keeps the store from waiting for all ranks: a meeting names those that are missing.
            result["store"], _, _ = next(rendezvous(url, rank, 1, timeout=limit))
        except Exception as error:  # noqa: BLE001 - raised again by who waits
            result["error"] = error

    thread = threading.Thread(target=connect, name="booster store", daemon=True)
    thread.start()
    thread.join(max(1.0, deadline - time.monotonic()) + 1.0)
    if "store" in result:
        store: Store = result["store"]
        return store
    error = result.get("error")
    reason = str(error or "no answer").splitlines()[0].rstrip(".")
    if is_server and "EADDRINUSE" in reason:
        msg = f"Rank 0 cannot open {address}: the port is in use by another program. Choose another port."
    elif is_server:
        msg = (
            f"Rank 0 could not open and reach the store at {address} within {timeout_seconds:g} s: {reason}. Check "
            "that the host name means the machine on which rank 0 runs."
        )
    else:
        msg = (
            f"Rank {rank} connected to {address}, but what listens there did not answer as rank 0 of this run within "
            f"{timeout_seconds:g} s: {reason}. The port may be in use by another program. Choose another port."
        )
    raise LaunchError(msg) from error
