"""The monitor's server: one thread of rank 0 that holds a connection to every rank and carries messages."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from booster_runtime.watch.noted_calls import parse_noted
from booster_runtime.watch.sockets import describe_loss, encode, keep_from_children, outlast_interruptions, say, shorten
from booster_runtime.watch.verdicts import Record, Verdicts, parse_call

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from booster_runtime.watch.verdicts import Call

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
_MAX_LINE_BYTES = 1 << 18
_MAX_UNSENT_BYTES = 1 << 24
"""How far a rank may fall behind in reading; until it catches up it is sent nothing more."""
_MAX_COMPLAINTS = 10
_BACKLOG = 4096


class _Round:
    """One question to all ranks where they are, shared by all that ask meanwhile."""

    def __init__(self, ranks: set[int]) -> None:
        self.silent = ranks
        self.askers: dict[Call, list[int]] = {}
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
        self._verdicts = Verdicts(hosts)
        self._unknown: dict[asyncio.StreamWriter, None] = {}
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._conversations: set[asyncio.Task[None]] = set()
        self._round: _Round | None = None
        self._is_told = self._is_over = False
        self._num_complaints = 0
        self._listener = _listen(addresses)
        self.address, self.port = self._listener.getsockname()[:2]
        keep_from_children(self._listener)
        self._loop = asyncio.new_event_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(self._stop_for)
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
        with contextlib.suppress(RuntimeError):  # it may have ended already
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(self._serve())
        self._listener.close()
        self._loop.close()

    async def _serve(self) -> None:
        """Serve until `close`, or until the watch itself fails, which every rank is told."""
        tasks = [self._loop.create_task(self._accept()), self._loop.create_task(self._tick())]
        for task in tasks:
            task.add_done_callback(self._stop_after)
        cause = None
        try:
            await self._end
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            cause = f"{type(error).__name__}: {error}"
            say(
                "Booster: the monitor has stopped; from now on a rank that dies is waited for until the time limit of "
                f"{self._timeout_seconds:g} s. The cause:\n{''.join(traceback.format_exception(error))}"
            )
        self._is_over = True
        closing = encode({"type": "closing", "cause": cause, "gone": self._verdicts.gone})
        for rank in self._members:
            self._send(rank, closing)
        for writer in [*self._members.values(), *self._unknown]:
            writer.close()
        if self._conversations:  # each ends when what is unsent has gone
            await asyncio.wait(self._conversations, timeout=_CLOSE_SECONDS)
        tasks += self._conversations
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self, error: BaseException | None = None) -> None:
        if not self._end.done():
            if error is None:
                self._end.set_result(None)
            else:
                self._end.set_exception(error)

    def _stop_after(self, task: asyncio.Task[None]) -> None:
        """Stop if a task ended by an error, which is one of the watch itself."""
        self._conversations.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._stop(task.exception())

    def _stop_for(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._stop(context.get("exception") or RuntimeError(context["message"]))

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
            # Not by `asyncio.start_server`, which keeps the sockets to itself: forks must close them.
            reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_LINE_BYTES)
            self._unknown[writer] = None
            if len(self._unknown) > max(_MAX_UNKNOWN, 2 * self._world_size):
                next(iter(self._unknown)).close()
            conversation = self._loop.create_task(self._talk(reader, writer))
            self._conversations.add(conversation)
            conversation.add_done_callback(self._stop_after)

    async def _tick(self) -> None:
        """Do what is due without a message."""
        while True:
            self._verdicts.tick(time.monotonic())
            self._tell_failure()
            if self._round is None and (places := self._verdicts.places_to_ask()):
                self._ask(places=places)
            await asyncio.sleep(_TICK_SECONDS)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold one connection: learn which rank is there, and hear it. A rank that says no goodbye is lost."""
        rank: int | None = None
        error: Exception | None = None
        try:
            rank = self._let_in(await asyncio.wait_for(reader.readline(), _HELLO_SECONDS), writer)
            if rank is not None:
                await self._hear(rank, reader)
        except (OSError, ValueError, asyncio.TimeoutError) as problem:
            error = problem
        self._unknown.pop(writer, None)
        if rank is not None:
            self._members.pop(rank, None)
            if not self._is_over:
                self._verdicts.lost(rank, time.monotonic(), describe_loss(error, self._timeout_seconds))
                self._heard(rank)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _let_in(self, line: bytes, writer: asyncio.StreamWriter) -> int | None:
        """Return the rank that says hello; ``None`` for a third party, and where the rank is here already."""
        try:
            hello = json.loads(line)
            rank, pid, token = hello["rank"], hello["pid"], str(hello["token"]).encode(errors="replace")
        except Exception:  # noqa: BLE001 - a third party may send anything
            return None
        is_known = type(rank) is type(pid) is int and hmac.compare_digest(token, self._token)
        if not is_known or hello.get("type") != "hello" or not 0 <= rank < self._world_size or rank in self._members:
            return None
        self._unknown.pop(writer, None)
        self._members[rank] = writer
        self._verdicts.joined(rank, pid)
        self._send(rank, encode({"type": "welcome", "speaks": self._verdicts.speaks_without_server(rank)}))
        if self._is_told:
            self._send(rank, encode({**self._verdicts.news(())[rank], "speaks": False}))
        return int(rank)

    async def _hear(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Act on what a rank says until it says goodbye or its connection ends.

        What can't be read is ignored: that is no reason to call the rank dead.

        Raises:
            OSError: If the connection ends by an error.
        """
        while True:
            line = b""
            try:
                line = await reader.readline()
                if not line.endswith(b"\n"):
                    return
                message = json.loads(line)
                if message["type"] == "bye":
                    self._verdicts.left(rank)
                    return
                self._act_on(rank, message)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, this message alone is ignored
                self._num_complaints += 1
                if self._num_complaints <= _MAX_COMPLAINTS:
                    problem = f"{type(error).__name__}: {error}: {shorten(line)}"
                    say(f"Booster: the monitor ignores a message of rank {rank}: {problem}\n")

    def _act_on(self, rank: int, message: dict[str, Any]) -> None:
        """Act on a message.

        Raises:
            Exception: If it is none, of whichever kind; nothing has been done then.
        """
        kind = message["type"]
        if kind == "called":
            self._verdicts.called(rank, parse_noted(message["call"], self._world_size))
            self._tell_failure()
            return
        record = Record.parse(message["record"], self._world_size)
        if kind == "failed":
            self._verdicts.failed(rank, str(message["text"]), record)
        elif kind == "ending":
            self._verdicts.ending(rank, record)
        elif kind == "here":
            self._verdicts.here(rank, record, float(message["waited_seconds"]), time.monotonic())
        elif kind == "where":
            call = parse_call(message["call"], message["ranks"], self._world_size)
            self._verdicts.here(rank, record, 0.0, time.monotonic())
            self._ask(rank).askers.setdefault(call, []).append(rank)
        else:
            msg = f"no message of a known type: {kind!r}"
            raise ValueError(msg)
        self._heard(rank)

    def _ask(self, asker: int | None = None, places: Collection[tuple[str, int]] = ()) -> _Round:
        """Ask every rank but one where it is, unless that is being done."""
        if self._round is None:
            self._round = _Round((self._verdicts.present & self._members.keys()) - {asker})
            question = encode({"type": "where", "places": list(places)})
            for rank in self._round.silent:
                self._send(rank, question)
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
        for call, ranks in asked.askers.items():  # computed and written once for all that ask the same
            answer = {
                "type": "missing",
                "call": call[:2],
                "missing": self._verdicts.missing(call, asked.silent),
                "ended": self._verdicts.ended(sorted(ranks), call),
            }
            encoded = encode(answer)
            for rank in ranks:
                self._send(rank, encoded)
        if asked.tells_failure:
            self._is_told = True
            told = self._verdicts.news(asked.silent)
            for rank, news in told.items():
                self._send(rank, encode(news))
            if told and all(news["rank"] is None and not news["speaks"] for news in told.values()):
                say(next(iter(told.values()))["text"])  # all ranks end already, and none of them has failed
        else:
            self._verdicts.tick(time.monotonic())
            self._tell_failure()

    def _send(self, rank: int, data: bytes) -> None:
        """Send a rank what its connection takes now, and the rest when it takes more."""
        writer = self._members.get(rank)
        if writer is not None and writer.transport.get_write_buffer_size() <= _MAX_UNSENT_BYTES:
            writer.write(data)


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
