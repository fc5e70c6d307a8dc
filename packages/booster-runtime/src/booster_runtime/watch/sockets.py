"""The monitor's TCP connections: messages, how long they outlast a broken network, and that forks don't share them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import selectors
import socket
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_IDLE_SECONDS = 10
_INTERVAL_SECONDS = 3
_MAX_PROBES = 100
_MAX_SECONDS = 2_000_000
"""What fits in the kernel's milliseconds."""
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_kept_from_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message: a JSON object in a line."""
    return json.dumps(message, default=vars).encode() + b"\n"


def is_readable(connection: socket.socket, seconds: float) -> bool:
    """Wait until a connection has something to read, or has ended; return whether it has.

    ``select.select`` takes no file numbered 1,024 or more, and loaders' shared memory has as many.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def say(text: str) -> None:
    """Write to the screen, and not through ``sys.stderr``, whose lock a main thread that hangs may hold."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def outlast_interruptions(connection: socket.socket, seconds: float) -> None:
    """Keep a connection open for so long while the other host can't be reached; then the kernel gives it up.

    A process that ends closes its connections, which is noticed at once. A network that fails for a while closes
    none, and neither does a host that loses power: only the time limit tells these two apart.
    """
    seconds = max(1, min(math.ceil(seconds), _MAX_SECONDS))
    idle = min(_IDLE_SECONDS, seconds)
    interval = max(_INTERVAL_SECONDS, math.ceil((seconds - idle) / _MAX_PROBES))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", max(1, math.ceil((seconds - idle) / interval))),
        ("TCP_USER_TIMEOUT", 1000 * seconds),
    ):
        if hasattr(socket, option):  # systems differ
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def describe_loss(error: Exception | None, timeout_seconds: float) -> str:
    """Return how a rank was lost whose connection ended with this error, or without one."""
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return f"could not be reached for {timeout_seconds:g} s"
    return "died"


def keep_from_children(connection: socket.socket) -> None:
    """Close a socket in processes that this one forks.

    A data loader's worker that outlives its parent would otherwise hold the parent's connection open, and hide its
    death.
    """
    if not _kept_from_children:
        os.register_at_fork(after_in_child=_close_in_child)
    _kept_from_children.add(connection)


def _close_in_child() -> None:
    for connection in list(_kept_from_children):
        with contextlib.suppress(OSError):
            connection.close()
    _kept_from_children.clear()
