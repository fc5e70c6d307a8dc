"""The monitor's server: one thread of rank 0 that holds a connection to every rank and carries messages."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from booster_runtime.watch.links import Link, RefusedError
from booster_runtime.watch.records import Record, parse_call
from booster_runtime.watch.sockets import describe_loss, keep_from_children, outlast_interruptions
from booster_runtime.watch.verdicts import Verdicts
from booster_runtime.watch.wire import MAX_LINE_BYTES, Message, encode, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_runtime.watch.records import Call

_ANSWER_SECONDS = 2.0
"""How long ranks may take to say where they are."""
_NEWS_SECONDS = 1.0
"""The same, where a rank has failed and the others are to hear of it."""
_CLOSE_SECONDS = 1.0
_TICK_SECONDS = 1.0
_HELLO_SECONDS = 10.0
"""How long a new connection may take to say who it is."""
_MAX_UNKNOWN = 256
"""New connections that have not said who they are, but at least two per rank; beyond that, the oldest is closed."""
_MAX_SAID = 10
_BACKLOG = 4096


class _Round:
    """One question to all ranks where they are, shared by all that ask meanwhile."""

    def __init__(self, ranks: set[int]) -> None:
        self.silent = ranks
        self.askers: list[tuple[int, Call, tuple[int, ...] | None]] = []
        self.lines: list[str] = []
        self.tells_failure = False


class Server:
    """Carries messages between ranks, as `Verdicts` decides.

    Args:
        hosts: Host of each rank.
        token: What a member must know to be let in.
        addresses: Addresses of this host; the server listens at the first that can be bound.
        timeout_seconds: How long a rank that can't be reached is waited for.

    Raises:
        OSError: If no port can be opened at any of them.
    """

    def __init__(
        self, hosts: Sequence[str], token: str, addresses: Sequence[str], *, timeout_seconds: float = 600.0
    ) -> None:
        self._world_size = len(hosts)
        self._token = token.encode()
        self._timeout_seconds = timeout_seconds
        self._verdicts = Verdicts(hosts, timeout_seconds)
        self._unknown: dict[Link, None] = {}
        self._links: dict[int, Link] = {}
        self._round: _Round | None = None
        self._is_told = self._is_over = False
        self._num_said = 0
        self._cause: str | None = None
        self._listener = _listen(addresses)
        self.address, self.port = self._listener.getsockname()[:2]
        keep_from_children(self._listener)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._give_up)
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
        with contextlib.suppress(RuntimeError):  # it may have ended already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _handle(self, link: Link, message: Message) -> None:
        """Act on a message.

        Raises:
            RefusedError: If it comes from no rank of this run.
        """
        kind, rank = message["type"], link.rank
        if rank is None:
            self._let_in(link, message)
            return
        if kind == "bye":
            self._verdicts.left(rank)
            link.close()
        else:
            record = Record.parse(message["record"])
            if kind == "failed":
                self._verdicts.failed(rank, message["text"], record)
            elif kind == "ending":
                self._verdicts.ending(rank, record)
            else:
                line = self._verdicts.here(rank, record, message.get("idle_seconds", 0.0), time.monotonic())
                if line is not None:
                    self._ask().lines.append(line)
            if kind == "where":
                self._question(rank, message)
        self._heard(rank)

    def _forget(self, link: Link, error: OSError | None) -> None:
        """Forget a connection that has ended; a rank that said no goodbye is lost."""
        self._unknown.pop(link, None)
        if link.rank is not None:
            self._links.pop(link.rank, None)
            if not self._is_over:
                self._verdicts.lost(link.rank, describe_loss(error, self._timeout_seconds))
                self._heard(link.rank)

    def _complain(self, text: str) -> None:
        """Say what the monitor ignores, a few times at most."""
        self._num_said += 1
        if self._num_said <= _MAX_SAID:
            say(text)

    def _serve(self) -> None:
        accepting = self._loop.create_task(self._accept())
        accepting.add_done_callback(self._stop_accepting)
        try:
            self._tick()
            self._loop.run_forever()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            self._give_up(self._loop, {"exception": error})
        self._is_over = True
        accepting.cancel()
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(self._say_goodbye())
        self._listener.close()
        self._loop.close()

    async def _say_goodbye(self) -> None:
        """Tell all members that nobody is watched any more."""
        gone = {str(rank): how for rank, how in self._verdicts.gone.items()}
        for link in [*self._links.values(), *self._unknown]:
            if link.rank is not None:
                link.send(encode({"type": "closing", "cause": self._cause, "gone": gone}))
            link.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        await asyncio.sleep(0)
        while self._links and time.monotonic() < deadline:  # noqa: ASYNC110 - until what is unsent has gone
            await asyncio.sleep(0.01)

    def _give_up(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say that nobody is watched any more, here and to all members."""
        error = context.get("exception") or context.get("message")
        self._cause = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else f"{error}\n"
        say(
            "Booster: the monitor has stopped; from now on a rank that dies is waited for until the time limit of "
            f"{self._timeout_seconds:g} s. The cause:\n{trace}"
        )
        loop.stop()

    async def _accept(self) -> None:
        """Take connections in."""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
                outlast_interruptions(connection, self._timeout_seconds)
            except OSError:  # the other side has gone, or no more files can be opened: not again without a pause
                await asyncio.sleep(0.01)
                continue
            keep_from_children(connection)
            link = Link(connection, self._handle, self._forget, self._complain)
            self._unknown[link] = None
            await self._loop.connect_accepted_socket(link.itself, connection)
            if len(self._unknown) > max(_MAX_UNKNOWN, 2 * self._world_size):
                next(iter(self._unknown)).close()

    def _stop_accepting(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._give_up(self._loop, {"exception": task.exception()})

    def _tick(self) -> None:
        """Do what is due without a message."""
        now = time.monotonic()
        for link in [link for link in self._unknown if now - link.since >= _HELLO_SECONDS]:
            link.close()
        self._verdicts.tick(now)
        self._tell_failure()
        self._loop.call_later(_TICK_SECONDS, self._tick)

    def _let_in(self, link: Link, message: Message) -> None:
        """Learn which rank a connection belongs to."""
        if message["type"] != "hello" or not hmac.compare_digest(
            message["token"].encode(errors="replace"), self._token
        ):
            raise RefusedError
        rank = message["rank"]
        if rank in self._links or not 0 <= rank < self._world_size:
            raise RefusedError
        link.rank = rank
        link.lines.max_bytes = MAX_LINE_BYTES
        self._unknown.pop(link, None)
        self._links[rank] = link
        self._verdicts.joined(rank, message["pid"])
        link.send(encode({"type": "welcome", "speaks": self._verdicts.speaks_without_server(rank)}))
        if self._is_told:
            link.send(encode({**self._verdicts.news(())[rank], "speaks": False}))

    def _question(self, rank: int, message: Message) -> None:
        """Answer a rank that asks who has not come to a call, once all have said where they are."""
        call = parse_call(message["call"])
        assert call is not None, "a list"
        ranks = message["ranks"]
        members = None if ranks is None else tuple(sorted({int(r) for r in ranks} & set(range(self._world_size))))
        self._ask(rank).askers.append((rank, call, members))

    def _ask(self, asker: int | None = None) -> _Round:
        """Ask every rank but one where it is, unless that is being done."""
        if self._round is None:
            self._round = _Round((self._verdicts.present & self._links.keys()) - {asker})
            for rank in self._round.silent:
                self._links[rank].send(_WHERE)
            self._loop.call_later(_ANSWER_SECONDS, self._answer, self._round)
        return self._round

    def _heard(self, rank: int) -> None:
        """Note that a rank has said where it is, or is gone."""
        self._tell_failure()
        if self._round is not None:
            self._round.silent.discard(rank)
            if not self._round.silent:
                self._loop.call_soon(self._answer, self._round)

    def _tell_failure(self) -> None:
        """Tell everybody of a failure, once all have said where they are."""
        if self._verdicts.failure is None or self._is_told or self._ask().tells_failure:
            return
        asked = self._ask()
        asked.tells_failure = True
        self._loop.call_later(_NEWS_SECONDS if asked.silent else 0.0, self._answer, asked)

    def _answer(self, asked: _Round) -> None:
        """End a round: tell those that asked, and everybody where a rank has failed."""
        if self._round is not asked:
            return  # it has been answered
        self._round = None
        texts: dict[tuple[Call, tuple[int, ...] | None], str] = {}
        for rank, call, members in asked.askers:
            if (call, members) not in texts:
                texts[call, members] = self._verdicts.missing(call, members, asked.silent)
            ended = self._verdicts.ended(rank, call, members)
            answer = {"type": "missing", "call": call, "missing": texts[call, members], "ended": ended}
            if rank in self._links:
                self._links[rank].send(encode(answer))
        if asked.lines:
            say("\n".join([*asked.lines, f"Booster: last calls: {self._verdicts.places(asked.silent)}.\n"]))
        if asked.tells_failure:
            self._is_told = True
            for rank, news in self._verdicts.news(asked.silent).items():
                if rank in self._links:
                    self._links[rank].send(encode(news))


_WHERE = encode({"type": "where"})


def _listen(addresses: Sequence[str]) -> socket.socket:
    """Return a socket that listens at the first of the addresses that is this host's.

    Raises:
        OSError: If none is.
    """
    problems = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            problems.append(f"{address}: {error}")
            continue
        listener.setblocking(False)  # noqa: FBT003 - the socket module's only form
        return listener
    msg = f"no port could be opened: {'; '.join(problems) or 'no address is known by which other hosts reach this one'}"
    raise OSError(msg)
