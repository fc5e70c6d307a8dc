"""What server and members of the monitor say to each other: JSON objects, one per line, over TCP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import weakref
from typing import Any

Message = dict[str, Any]

_MAX_LINE_BYTES = 1 << 20
_IDLE_SECONDS = 10
_INTERVAL_SECONDS = 3
_NUM_PROBES = 3
_kept_from_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Lines:
    """The bytes received so far, cut into messages."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that ``data`` completes.

        Raises:
            ValueError: If the other side does not speak this language.
        """
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_LINE_BYTES:
            msg = "a message without end"
            raise ValueError(msg)
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            msg = "a message that is no object"
            raise ValueError(msg)
        return messages


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return json.dumps(message).encode() + b"\n"


def notice_vanished_machines(connection: socket.socket) -> None:
    """Let the kernel probe an idle connection, so that a machine that vanished is noticed within about 20 s.

    A process that ends closes its connections; a machine that loses power does not.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _IDLE_SECONDS),
        ("TCP_KEEPINTVL", _INTERVAL_SECONDS),
        ("TCP_KEEPCNT", _NUM_PROBES),
        ("TCP_USER_TIMEOUT", 1000 * (_IDLE_SECONDS + _INTERVAL_SECONDS * _NUM_PROBES)),
    ):
        if hasattr(socket, option):  # systems differ
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


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
