"""The server's ends of the connections: bytes to messages, and which rank is behind them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from typing import TYPE_CHECKING, Any

from booster_runtime.watch.wire import FROM_MEMBERS, MAX_HELLO_BYTES, Lines

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from booster_runtime.watch.wire import Message

_MAX_UNSENT_BYTES = 1 << 24
"""How far a rank may fall behind in reading; until it catches up it is sent nothing more."""


class RefusedError(Exception):
    """A connection without the token, or of a rank that is here already."""


class Link(asyncio.Protocol):
    """One connection, and the rank behind it once it has said hello.

    Args:
        connection: The connection.
        handle: Called with each message.
        forget: Called when the connection has ended, with the error if there was one.
        complain: Called with what a rank has sent that is ignored.
    """

    def __init__(
        self,
        connection: socket.socket,
        handle: Callable[[Link, Message], None],
        forget: Callable[[Link, OSError | None], None],
        complain: Callable[[str], None],
    ) -> None:
        self._handle, self._forget, self._complain = handle, forget, complain
        self._connection = connection
        self._transport: Any = None
        self.lines = Lines(FROM_MEMBERS, self.refuse, MAX_HELLO_BYTES)
        self.rank: int | None = None
        self.since = time.monotonic()

    def itself(self) -> Link:
        """Return this, as asyncio calls a function for it."""
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.lines.feed(data):
                self._act_on(message)
        except RefusedError:
            self.close()

    def _act_on(self, message: Message) -> None:
        """Handle a message. An error over one must not end the watch over all, nor lose the messages behind it."""
        try:
            self._handle(self, message)
        except RefusedError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, this message alone is ignored
            self.refuse(traceback.format_exc())

    def connection_lost(self, exc: Exception | None) -> None:
        with contextlib.suppress(OSError):
            while self.rank is not None and (data := self._connection.recv(1 << 16)):
                self.data_received(data)  # where writing failed, a goodbye may not have been read yet
        self._forget(self, exc if isinstance(exc, OSError) else None)

    def send(self, data: bytes) -> None:
        """Send what the connection takes now, and the rest when it takes more."""
        if self._transport.get_write_buffer_size() <= _MAX_UNSENT_BYTES:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection when everything has been sent."""
        self._transport.close()

    def refuse(self, problem: str) -> None:
        """Ignore what a rank has sent: that is no reason to call it dead.

        Raises:
            RefusedError: If it was no rank.
        """
        if self.rank is None:
            raise RefusedError
        self._complain(f"Booster: the monitor ignores a message of rank {self.rank}: {problem}\n")
