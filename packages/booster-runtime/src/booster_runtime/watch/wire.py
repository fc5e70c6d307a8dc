"""The messages between server and members of the monitor: JSON objects, one per line."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Message = dict[str, Any]
Kinds = dict[str, dict[str, tuple[type, ...]]]

MAX_LINE_BYTES = 1 << 20
MAX_HELLO_BYTES = 1 << 12
"""Longest line of a connection that has not shown the token."""

FROM_MEMBERS: Kinds = {
    "hello": {"rank": (int,), "pid": (int,), "token": (str,)},
    "here": {"record": (dict,), "idle_seconds": (float,)},
    "where": {"record": (dict,), "call": (list,), "ranks": (list, type(None))},
    "failed": {"record": (dict,), "text": (str,)},
    "ending": {"record": (dict,)},
    "bye": {},
}
FROM_SERVER: Kinds = {
    "welcome": {"speaks": (bool,)},
    "where": {},
    "missing": {"call": (list,), "missing": (str,), "ended": (str, type(None))},
    "failure": {"rank": (int, type(None)), "text": (str,), "speaks": (bool,)},
    "closing": {"cause": (str, type(None)), "gone": (dict,)},
}
_SHOWN_BYTES = 80


class Lines:
    """The bytes received so far, cut into messages.

    Args:
        kinds: The known messages, and the types of each one's fields.
        refuse: Called with what is wrong with a line that is no message; the lines after it count.
        max_bytes: Longest line.
    """

    def __init__(self, kinds: Kinds, refuse: Callable[[str], None], max_bytes: int = MAX_LINE_BYTES) -> None:
        self._kinds = kinds
        self._refuse = refuse
        self.max_bytes = max_bytes
        self._pending = bytearray()
        self._is_skipping = False

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that ``data`` completes."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole, self._pending = bytes(self._pending + line), bytearray()
            was_refused, self._is_skipping = self._is_skipping, False
            if was_refused:  # for its length, before it ended
                continue
            try:
                message = self._parse(whole)
            except (ValueError, RecursionError) as error:
                self._refuse(f"{error}: {_shorten(whole)}")
            else:
                yield message
        if not self._is_skipping:
            self._pending += rest
        if len(self._pending) > self.max_bytes:
            start, self._pending, self._is_skipping = bytes(self._pending), bytearray(), True
            self._refuse(f"a line of more than {self.max_bytes} bytes: {_shorten(start)}")

    def _parse(self, line: bytes) -> Message:
        if len(line) > self.max_bytes:
            msg = f"a line of more than {self.max_bytes} bytes"
            raise ValueError(msg)
        message = json.loads(line)
        kind = message.get("type") if isinstance(message, dict) else None
        fields = self._kinds.get(kind) if isinstance(kind, str) else None
        if fields is None:
            msg = "no message of a known type"
            raise ValueError(msg)
        for name, types in fields.items():
            # By the exact class, as True is an int to `isinstance`.
            if name not in message or type(message[name]) not in types:
                msg = f"a {kind!r} whose {name!r} is missing or wrong"
                raise ValueError(msg)
        return message  # type: ignore[no-any-return] # a dict, or it would have no kind


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return json.dumps(message).encode() + b"\n"


def say(text: str) -> None:
    """Write to the screen, and not through ``sys.stderr``, whose lock a main thread that hangs may hold."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _shorten(line: bytes) -> str:
    return ascii(line[:_SHOWN_BYTES]) + ("..." if len(line) > _SHOWN_BYTES else "")
