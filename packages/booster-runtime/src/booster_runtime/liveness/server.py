"""The monitor's server: one thread of rank 0 that holds a connection to every rank and carries messages."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
import traceback
from typing import TYPE_CHECKING

from booster_runtime.liveness.verdicts import HOLD_SECONDS, Verdicts
from booster_runtime.liveness.wire import (
    FROM_MEMBERS,
    MAX_HELLO_BYTES,
    MAX_LINE_BYTES,
    Lines,
    Message,
    encode,
    is_unreachable,
    keep_from_children,
    outlast_interruptions,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_ANSWER_SECONDS = 2.0
_CLOSE_SECONDS = 1.0
_HELLO_SECONDS = 10.0
"""How long somebody who has connected may take to say who it is."""
_MAX_UNKNOWN = 256
"""Connections of which nobody knows whose they are; beyond that, the oldest is closed."""
_MAX_OUTGOING_BYTES = 1 << 24
_MAX_SAID = 10
_BACKLOG = 4096
_READ = selectors.EVENT_READ


class _Link:
    """One connection, and the rank behind it once it has said hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Lines(FROM_MEMBERS, MAX_HELLO_BYTES)
        self.rank: int | None = None
        self.since = time.monotonic()
        self.outgoing = bytearray()


class _RefusedError(Exception):
    """Somebody without the token, or a rank that is here already."""


class _Question:
    """A rank's question for everyone's progress, and the answers so far."""

    def __init__(self, asker: int, deadline: float) -> None:
        self.asker = asker
        self.deadline = deadline
        self.answers: dict[int, Message] = {}


class Server:
    """Carries messages between ranks, as `Verdicts` decides.

    Args:
        hosts: Host of each rank.
        token: What a member must know to be let in.
        speakers_end_first: As for `Verdicts`.
        timeout_seconds: How long a rank that can't be reached is waited for.

    Raises:
        OSError: If no port can be opened.
    """

    def __init__(
        self, hosts: Sequence[str], token: str, *, speakers_end_first: bool, timeout_seconds: float = 600.0
    ) -> None:
        self._world_size = len(hosts)
        self._token = token.encode()
        self._timeout_seconds = timeout_seconds
        self._unknown: dict[_Link, None] = {}
        self._num_said = 0
        self._verdicts = Verdicts(hosts, speakers_end_first=speakers_end_first)
        self._links: dict[int, _Link] = {}
        self._questions: dict[int, _Question] = {}
        self._num_questions = 0
        is_one_host = len(set(hosts)) == 1
        self._listener = socket.create_server(("127.0.0.1" if is_one_host else "", 0), backlog=_BACKLOG)
        self._listener.setblocking(False)  # noqa: FBT003 - the socket module's only form
        self.port: int = self._listener.getsockname()[1]
        keep_from_children(self._listener)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="booster monitor server", daemon=True)

    @property
    def num_members(self) -> int:
        """Number of ranks that are connected, the server's own among them."""
        return len(self._links)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Tell the members that the server ends normally, and end it."""
        with contextlib.suppress(OSError):  # it may have ended already
            self._wake_write.send(b"x")
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        cause = None
        try:
            while self._serve_once():
                pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on, and is told that nobody watches it
            cause = f"{type(error).__name__}: {error}"
            say(
                "Booster: the monitor has stopped; from now on a rank that dies is waited for until the time limit of "
                f"{self._timeout_seconds:g} s. The cause:\n{traceback.format_exc()}"
            )
        finally:
            gone = {str(rank): how for rank, how in self._verdicts.gone.items()}
            for link in list(self._links.values()):
                with contextlib.suppress(OSError, ValueError):
                    link.connection.settimeout(_CLOSE_SECONDS)
                    link.connection.sendall(
                        bytes(link.outgoing) + encode({"type": "closing", "cause": cause, "gone": gone})
                    )
            for key in list(self._selector.get_map().values()):
                with contextlib.suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self._wake_write.close()

    def _serve_once(self) -> bool:
        """Handle what has come; return whether to go on."""
        is_busy = self._verdicts.is_holding or self._questions
        pause = HOLD_SECONDS / 10 if is_busy else _HELLO_SECONDS if self._unknown else None
        for key, events in self._selector.select(pause):
            if key.fileobj is self._wake_read:
                return False
            if key.fileobj is self._listener:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)
        now = time.monotonic()
        for link in [link for link in self._unknown if now - link.since >= _HELLO_SECONDS]:
            self._drop(link, None)
        self._send_all(self._verdicts.tick(now))
        for number, question in list(self._questions.items()):
            if now >= question.deadline or len(question.answers) == self._world_size:
                self._answer(number)
        return True

    def _accept(self) -> None:
        if len(self._unknown) >= _MAX_UNKNOWN:
            self._drop(next(iter(self._unknown)), None)
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no files left: not to be tried again without a pause
            time.sleep(HOLD_SECONDS / 100)
            return
        link = _Link(connection)
        try:
            connection.setblocking(False)  # noqa: FBT003 - the socket module's only form
            outlast_interruptions(connection, self._timeout_seconds)
            keep_from_children(connection)
        except OSError:  # it has gone again
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, link)
        self._unknown[link] = None

    def _read(self, link: _Link) -> None:
        if link.connection.fileno() < 0:
            return  # closed since the selector looked
        try:
            data = link.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._drop(link, error)
            return
        try:
            for message in link.lines.feed(data, lambda error: self._complain(link, error)):
                if not self._handle(link, message):
                    self._drop(link, None)
                    return
        except _RefusedError:
            self._drop(link, None)
            return
        except Exception:  # noqa: BLE001 - an error of ours over one message must not end the watch over all
            if link.rank is None:
                self._drop(link, None)
                return
            self._complain(link, traceback.format_exc())
        if not data:
            self._drop(link, None)

    def _complain(self, link: _Link, problem: object) -> None:
        """Say that a rank has sent something that is left out of account: that is no reason to call it dead.

        Raises:
            _RefusedError: If it was no rank.
        """
        if link.rank is None:
            raise _RefusedError
        self._num_said += 1
        if self._num_said <= _MAX_SAID:
            say(f"Booster: the monitor ignores a message of rank {link.rank}: {problem}\n")

    def _drop(self, link: _Link, error: OSError | None) -> None:
        """Forget a connection; if a rank was behind it that said no goodbye, it is lost."""
        self._unknown.pop(link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.connection)
        link.connection.close()
        if link.rank is not None and self._links.pop(link.rank, None) is not None:
            how = "has died"
            if error is not None and is_unreachable(error):
                how = f"could not be reached for {self._timeout_seconds:g} s"
            self._send_all(self._verdicts.lost(link.rank, how))

    def _handle(self, link: _Link, message: Message) -> bool:
        """Act on a message; return whether more may come.

        Raises:
            _RefusedError: If it comes from no rank of this run.
        """
        kind = message["type"]
        if link.rank is None:
            if kind != "hello" or not hmac.compare_digest(message["token"].encode(errors="replace"), self._token):
                raise _RefusedError
            rank = message["rank"]
            if rank in self._links or not 0 <= rank < self._world_size:
                raise _RefusedError
            link.rank = rank
            link.lines.max_bytes = MAX_LINE_BYTES
            del self._unknown[link]
            self._links[rank] = link
            self._send_all(self._verdicts.joined(rank, message["pid"]))
        elif kind == "failed":
            self._send_all(
                self._verdicts.failed(link.rank, message["text"], time.monotonic(), is_derived=message["is_derived"])
            )
        elif kind == "bye":
            self._links.pop(link.rank, None)
            self._send_all(self._verdicts.left(link.rank))
            return False
        elif kind == "ending":
            self._send_all(self._verdicts.ending(link.rank, message["record"]))
        elif kind == "waiting":
            self._send_all(self._verdicts.waits(link.rank, message["record"], message["seconds"], time.monotonic()))
        elif kind == "where":
            self._ask(link.rank)
        elif kind == "here" and message["question"] in self._questions:
            self._questions[message["question"]].answers.setdefault(link.rank, message["record"])
        return True

    def _ask(self, asker: int) -> None:
        """Ask every rank how far it has come."""
        self._num_questions += 1
        question = _Question(asker, time.monotonic() + _ANSWER_SECONDS)
        self._questions[self._num_questions] = question
        for rank in range(self._world_size):
            if rank not in self._links:
                question.answers[rank] = {"gone": self._verdicts.gone.get(rank, "has not connected")}
            elif rank in self._verdicts.gone:  # it waits for the others to end, too
                question.answers[rank] = {"gone": self._verdicts.gone[rank]}
            if rank in self._verdicts.final_counts:
                question.answers[rank]["counts"] = self._verdicts.final_counts[rank]
        for link in list(self._links.values()):
            self._send(link, {"type": "where", "question": self._num_questions})

    def _answer(self, number: int) -> None:
        question = self._questions.pop(number)
        for rank in range(self._world_size):
            question.answers.setdefault(rank, {"gone": "does not answer"})
        if question.asker in self._links:
            records = {str(rank): record for rank, record in question.answers.items()}
            self._send(self._links[question.asker], {"type": "progress", "records": records})

    def _send_all(self, messages: Sequence[tuple[int, Message]]) -> None:
        for rank, message in messages:
            if rank in self._links:
                self._send(self._links[rank], message)

    def _send(self, link: _Link, message: Message) -> None:
        """Send what the connection takes now; the rest follows when it takes more."""
        link.outgoing += encode(message)
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        had_more = link.connection.fileno() >= 0 and self._selector.get_key(link.connection).events != _READ
        # A connection that is broken is noticed where it is read.
        with contextlib.suppress(OSError):
            while link.outgoing:
                del link.outgoing[: link.connection.send(link.outgoing)]
        if len(link.outgoing) > _MAX_OUTGOING_BYTES:
            self._complain(link, f"it has not read the last {len(link.outgoing)} bytes that it was sent")
            link.outgoing.clear()
        if link.connection.fileno() >= 0 and had_more != bool(link.outgoing):
            events = _READ | selectors.EVENT_WRITE if link.outgoing else _READ
            self._selector.modify(link.connection, events, link)
