"""What server and members of the monitor say to each other: JSON objects, one per line, over TCP."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Message = dict[str, Any]
Kinds = dict[str, dict[str, tuple[type, ...]]]

MAX_LINE_BYTES = 1 << 20
MAX_HELLO_BYTES = 1 << 12
"""Longest line of somebody who has not shown the token."""

FROM_MEMBERS: Kinds = {
    "hello": {"rank": (int,), "pid": (int,), "token": (str,)},
    "failed": {"text": (str,), "is_derived": (bool,)},
    "bye": {},
    "ending": {"record": (dict,)},
    "waiting": {"record": (dict,), "seconds": (float,)},
    "where": {},
    "here": {"question": (int,), "record": (dict,)},
}
FROM_SERVER: Kinds = {
    "welcome": {"is_heir": (bool,)},
    "where": {"question": (int,)},
    "progress": {"records": (dict,)},
    "closing": {"cause": (str, type(None)), "gone": (dict,)},
    "go": {},
    "failure": {
        "rank": (int,),
        "world": (int,),
        "host": (str,),
        "pid": (int,),
        "how": (str,),
        "text": (str, type(None)),
        "speaks": (bool,),
        "waits": (bool,),
        "own": (bool,),
    },
}
_MAX_DEPTH = 8
_SHOWN_BYTES = 80
_IDLE_SECONDS = 10
_INTERVAL_SECONDS = 3
_MAX_PROBES = 100
_MAX_SECONDS = 2_000_000
"""What fits in the kernel's milliseconds."""
_kept_from_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Lines:
    """The bytes received so far, cut into messages.

    Args:
        kinds: The messages that may come, and the type of each of their fields; by default, any JSON object.
        max_bytes: Longest line.
    """

    def __init__(self, kinds: Kinds | None = None, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._kinds = kinds
        self.max_bytes = max_bytes
        self._pending = bytearray()
        self._is_skipping = False

    def feed(self, data: bytes, refuse: Callable[[ValueError], None] | None = None) -> Iterator[Message]:
        """Yield the messages that ``data`` completes; the next is looked at when it is asked for.

        Args:
            data: What was received.
            refuse: Called for each line that is no message; the lines after it count. By default it is raised.

        Raises:
            ValueError: If the other side does not speak this language.
        """
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._pending += line
            whole, self._pending = bytes(self._pending), bytearray()
            is_rest, self._is_skipping = self._is_skipping, False
            if is_rest:  # of a line that was refused before it ended
                continue
            try:
                message = self._parse(whole)
            except ValueError as error:
                if refuse is None:
                    raise
                refuse(error)
            else:
                yield message
        if not self._is_skipping:
            self._pending += rest
        if len(self._pending) > self.max_bytes:
            self._pending.clear()
            self._is_skipping = True
            endless = ValueError(f"a line of more than {self.max_bytes} bytes")
            if refuse is None:
                raise endless
            refuse(endless)

    def _parse(self, line: bytes) -> Message:
        if len(line) > self.max_bytes:
            msg = f"a line of more than {self.max_bytes} bytes"
            raise ValueError(msg)
        try:
            message = json.loads(line, parse_constant=_refuse_constant)
        except RecursionError:
            msg = "JSON nested too deeply"
            raise ValueError(msg) from None
        if not isinstance(message, dict):
            msg = f"no JSON object, but {shorten(line)}"
            raise ValueError(msg)  # noqa: TRY004 - what comes over the wire has no type of its own
        if self._kinds is None:
            return message
        kind = message.get("type")
        fields = self._kinds.get(kind) if isinstance(kind, str) else None
        if fields is None:
            msg = f"no message of a known type, but {shorten(line)}"
            raise ValueError(msg)
        for name, types in fields.items():
            # By the exact class, as True is an int to `isinstance`.
            if name not in message or type(message[name]) not in types or _is_deep(message[name], _MAX_DEPTH):
                msg = f"a {kind!r} whose {name!r} is missing or wrong: {shorten(line)}"
                raise ValueError(msg)
        return message


def _refuse_constant(name: str) -> None:
    msg = f"{name}, which is no JSON"
    raise ValueError(msg)


def _is_deep(value: Any, room: int) -> bool:
    """Whether a value is nested more deeply than any that is meant; one that is might not be encoded again."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return room == 0 or any(_is_deep(each, room - 1) for each in inner)


def shorten(line: bytes) -> str:
    """Return the beginning of what was received, in a printable form."""
    return ascii(line[:_SHOWN_BYTES]) + ("..." if len(line) > _SHOWN_BYTES else "")


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return json.dumps(message).encode() + b"\n"


def say(text: str) -> None:
    """Write to the screen at once, not through ``sys.stderr``, whose lock the main thread may hold for ever."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def outlast_interruptions(connection: socket.socket, seconds: float) -> None:
    """Let a connection live on while the other machine can't be reached, for so long; then the kernel gives it up.

    A process that ends closes its connections, which is noticed at once. A network that fails for a while closes
    none, and neither does a machine that loses power: that is told from the former by waiting only.
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


def is_unreachable(error: OSError) -> bool:
    """Whether a connection was given up because nothing came back, instead of closed by the other side."""
    return error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


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
