"""The monitor's server: one thread of rank 0 that holds a connection to every rank and carries messages."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

from booster_core.liveness.verdicts import HOLD_SECONDS, Verdicts
from booster_core.liveness.wire import Lines, Message, encode, keep_from_children, notice_vanished_machines

if TYPE_CHECKING:
    from collections.abc import Sequence

_ANSWER_SECONDS = 2.0
_SEND_SECONDS = 2.0
_BACKLOG = 4096


class _Link:
    """One connection, and the rank behind it once it has said hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Lines()
        self.rank: int | None = None


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
    """

    def __init__(self, hosts: Sequence[str], token: str, *, speakers_end_first: bool) -> None:
        self._world_size = len(hosts)
        self._token = token
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
        try:
            while self._serve_once():
                pass
        finally:
            for link in list(self._links.values()):
                self._send(link, {"type": "closing"})
            for key in list(self._selector.get_map().values()):
                with contextlib.suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self._wake_write.close()

    def _serve_once(self) -> bool:
        """Handle what has come; return whether to go on."""
        is_busy = self._verdicts.is_holding or self._questions
        for key, _ in self._selector.select(HOLD_SECONDS / 10 if is_busy else None):
            if key.fileobj is self._wake_read:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        self._send_all(self._verdicts.tick(now))
        for number, question in list(self._questions.items()):
            if now >= question.deadline or len(question.answers) == self._world_size:
                self._answer(number)
        return True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may have gone again
            connection, _ = self._listener.accept()
            connection.settimeout(_SEND_SECONDS)
            notice_vanished_machines(connection)
            keep_from_children(connection)
            self._selector.register(connection, selectors.EVENT_READ, _Link(connection))

    def _read(self, link: _Link) -> None:
        try:
            data = link.connection.recv(65536)
            messages = link.lines.feed(data)
            if not data:
                raise ConnectionError
            for message in messages:
                self._handle(link, message)
        except (OSError, ValueError, KeyError):
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        """Forget a connection; if a rank was behind it that said no goodbye, it is lost."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.connection)
        link.connection.close()
        if link.rank is not None and self._links.pop(link.rank, None) is not None:
            self._send_all(self._verdicts.lost(link.rank))

    def _handle(self, link: _Link, message: Message) -> None:
        kind = message["type"]
        if link.rank is None:
            rank = int(message["rank"])
            is_known = hmac.compare_digest(str(message["token"]), self._token)
            if kind != "hello" or not is_known or rank in self._links or not 0 <= rank < self._world_size:
                raise ConnectionError
            link.rank = rank
            self._links[rank] = link
            self._send_all(self._verdicts.joined(rank, int(message["pid"])))
        elif kind == "failed":
            text, is_derived = str(message["text"]), bool(message["is_derived"])
            self._send_all(self._verdicts.failed(link.rank, text, time.monotonic(), is_derived=is_derived))
        elif kind == "bye":
            self._links.pop(link.rank, None)
            self._send_all(self._verdicts.left(link.rank))
            raise ConnectionError
        elif kind == "where":
            self._ask(link.rank)
        elif kind == "here" and int(message["question"]) in self._questions:
            self._questions[int(message["question"])].answers[link.rank] = message["record"]

    def _ask(self, asker: int) -> None:
        """Ask every rank how far it has come."""
        self._num_questions += 1
        question = _Question(asker, time.monotonic() + _ANSWER_SECONDS)
        self._questions[self._num_questions] = question
        for rank in range(self._world_size):
            if rank not in self._links:
                question.answers[rank] = {"gone": self._verdicts.gone.get(rank, "has not connected")}
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
        # A connection that takes no data is noticed where it is read.
        with contextlib.suppress(OSError):
            link.connection.sendall(encode(message))
