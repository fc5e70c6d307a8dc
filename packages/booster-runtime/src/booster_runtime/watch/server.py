"""The monitor's server: one thread of rank 0 that holds a connection to every rank and carries messages."""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from booster_runtime.watch.failure_detector import FailureDetector, Record, beat_seconds, parse_point
from booster_runtime.watch.sockets import describe_loss, encode, keep_from_children, outlast_interruptions, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_runtime.watch.failure_detector import Point

_SELECT_SECONDS = 0.2
_CLOSE_SECONDS = 0.5
_TICK_SECONDS = 1.0
_HELLO_SECONDS = 10.0
"""How long a new connection may take to say who it is."""
_MAX_HELLO_BYTES = 4096
_BACKLOG = 4096


def answer_seconds(world_size: int) -> float:
    """Return after which time a question is answered: by then every rank has said where it is."""
    return beat_seconds(world_size) + 1.0


class _Connection:
    """One end of a connection; of a third party until it says hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.since = connection, time.monotonic()
        self.rank: int | None = None
        self.pending = b""


class Server:
    """Carries messages between ranks, as `FailureDetector` decides.

    Args:
        hosts: Host of each rank.
        token: What a member must know to be let in.
        address: The address to listen at; empty for all.
        timeout_seconds: How long a rank that can't be reached is waited for.

    Raises:
        OSError: If no port can be opened.
    """

    def __init__(self, hosts: Sequence[str], token: str, address: str, *, timeout_seconds: float = 600.0) -> None:
        self._world_size = len(hosts)
        self._token = token.encode()
        self._timeout_seconds = timeout_seconds
        self._verdicts = FailureDetector(hosts)
        self._members: dict[int, _Connection] = {}
        self._questions: dict[Point, tuple[float, list[int]]] = {}
        self._is_told = self._is_closing = False
        self._unread: set[int] = set()
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        self._listener.setblocking(False)  # noqa: FBT003 - the socket module's only form
        self.port: int = self._listener.getsockname()[1]
        keep_from_children(self._listener)
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="booster monitor server", daemon=True)

    @property
    def num_members(self) -> int:
        """Number of ranks that are connected, the server's own among them."""
        return len(self._members)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Tell the members that the server ends normally, and end it."""
        self._is_closing = True
        with contextlib.suppress(OSError):  # it may have ended already
            self._waker.send(b".")
        self._thread.join(timeout=5)

    def _run(self) -> None:
        """Serve until `close`, or until the watch itself fails, which every rank is told."""
        cause = None
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            cause = f"{type(error).__name__}: {error}"
            say(
                "Booster: the monitor has stopped; from now on a rank that dies is waited for until the time limit of "
                f"{self._timeout_seconds:g} s. The cause:\n{traceback.format_exc()}"
            )
        for rank, member in self._members.items():
            self._send(rank, type="closing", cause=cause)
            with contextlib.suppress(OSError):
                member.socket.shutdown(socket.SHUT_WR)
        # What comes is read: a connection that is closed before that is reset, and the last words may be lost.
        self._members.pop(0, None)  # whose process this is
        self._selector.unregister(self._listener)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._members and time.monotonic() < deadline:
            for key, _ in self._selector.select(_CLOSE_SECONDS):
                with contextlib.suppress(OSError):
                    if key.data is not None and key.data.socket.recv(1 << 16):
                        continue
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr] # a socket, as all are
                self._members.pop(getattr(key.data, "rank", None), None)  # type: ignore[arg-type] # of third parties
        left = [key.fileobj for key in self._selector.get_map().values()]
        self._selector.close()
        for each in (*left, self._listener, self._woken, self._waker):
            each.close()  # type: ignore[union-attr] # as above

    def _serve(self) -> None:
        next_tick = 0.0
        while not self._is_closing:
            for key, _ in self._selector.select(_SELECT_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._read(key.data)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                self._verdicts.tick(now)
                for each in [key.data for key in self._selector.get_map().values()]:
                    if each is not None and each.rank is None and now > each.since + _HELLO_SECONDS:
                        self._close(each)
            self._answer(now)
            if self._verdicts.failure is not None and not self._is_told:
                self._is_told = True
                for rank, news in self._verdicts.news(now).items():
                    self._send(rank, type="failure", **news)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            outlast_interruptions(connection, self._timeout_seconds)
        except OSError:  # the other side has gone, or no more files can be opened: not again without a pause
            time.sleep(0.01)
            return
        connection.setblocking(True)  # noqa: FBT003 - as above
        keep_from_children(connection)
        self._selector.register(connection, selectors.EVENT_READ, _Connection(connection))

    def _read(self, connection: _Connection) -> None:
        """Take what has come; a rank whose connection ends without a goodbye is lost."""
        data, error = b"", None
        try:
            data = connection.socket.recv(1 << 16)
        except OSError as problem:
            error = problem
        if not data:
            self._close(connection, describe_loss(error, self._timeout_seconds))
            return
        *lines, connection.pending = (connection.pending + data).split(b"\n")
        for line in lines:
            if connection.rank is not None:
                self._act_on(connection.rank, line)
            elif not self._let_in(connection, line):
                self._close(connection)
                return
        if connection.rank is None and len(connection.pending) > _MAX_HELLO_BYTES:
            self._close(connection)

    def _close(self, connection: _Connection, how: str | None = None) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.rank is not None and self._members.pop(connection.rank, None) is not None:
            self._verdicts.left(connection.rank, time.monotonic(), how)

    def _let_in(self, connection: _Connection, line: bytes) -> bool:
        """Return whether this is a hello of a rank that is not here yet, and no third party's words."""
        try:
            hello = json.loads(line)
            rank, pid, token = hello["rank"], hello["pid"], str(hello["token"]).encode(errors="replace")
        except Exception:  # noqa: BLE001 - a third party may send anything
            return False
        is_known = type(rank) is type(pid) is int and hmac.compare_digest(token, self._token)
        if not is_known or not 0 <= rank < self._world_size or rank in self._members:
            return False
        connection.rank = rank
        self._members[rank] = connection
        self._verdicts.joined(rank, pid)
        self._send(rank, type="welcome", reports_for_host=self._verdicts.speaks_without_server(rank))
        if self._is_told:
            self._send(
                rank, type="failure", **{**self._verdicts.news(time.monotonic())[rank], "reports_for_host": False}
            )
        return True

    def _act_on(self, rank: int, line: bytes) -> None:
        now = time.monotonic()
        try:
            message: dict[str, Any] = json.loads(line)
            kind = message["type"]
            record = Record() if kind == "bye" else Record.parse(message["record"])
        except Exception as error:  # noqa: BLE001 - as of a rank with another version
            if rank not in self._unread:
                self._unread.add(rank)
                say(
                    f"Booster: the monitor ignores what rank {rank} sends, which it can't read "
                    f"({type(error).__name__}: {error}). Install the same version of booster-runtime on all hosts."
                )
            return
        if kind == "bye":
            connection = self._members.pop(rank)
            self._verdicts.left(rank, now, None)
            connection.rank = None
            return
        self._verdicts.here(rank, record, now)
        if kind == "failed":
            self._verdicts.failed(rank, message["text"])
        elif kind == "ending":
            self._verdicts.ending(rank)
        elif kind == "where":
            due = now + answer_seconds(self._world_size)
            self._questions.setdefault(parse_point(message["call"]), (due, []))[1].append(rank)

    def _answer(self, now: float) -> None:
        """Tell those that have asked who has not come to a call, once others have said where they are."""
        for call, (due, ranks) in [*self._questions.items()]:
            if now >= due:
                del self._questions[call]
                told = {"missing": self._verdicts.missing(call, now), "ended": self._verdicts.ended(call, ranks)}
                for rank in ranks:
                    self._send(rank, type="missing", call=call[:2], **told)

    def _send(self, rank: int, **message: Any) -> None:
        if rank in self._members:
            with contextlib.suppress(OSError):  # one that is gone is noticed when it is read
                self._members[rank].socket.sendall(encode(message))
