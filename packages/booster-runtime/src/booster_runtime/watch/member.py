"""Each rank's end of the monitor: reports this process' failure, and ends it for another's.

The thread here acts whatever the main thread does, also while that sleeps or waits in a collective's C++ code. The main
thread gets a short time to end by itself first. Exceptions that a script catches are its own affair.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from booster_core.errors import MissingRanksError
from booster_core.ranks import PROGRESS
from booster_runtime.collectives.pending import WAITS
from booster_runtime.watch.failure_detector import ENDED, Point, Record, beat_seconds, describe_death
from booster_runtime.watch.flight_recorder import FlightRecord, FlightRecorder
from booster_runtime.watch.server import answer_seconds
from booster_runtime.watch.sockets import describe_loss, encode, is_readable, say
from booster_runtime.watch.uncaught import is_consequence, report_uncaught

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from booster_core.ranks import World
    from booster_runtime.watch.server import Server

GRACE_SECONDS = 5.0
"""How long the main thread may take to end by itself when another rank has failed."""

_TOLD_SECONDS = 3.0
"""How long to wait for news of a failure: another's, where an error looks like its consequence, or the own."""
_END_SECONDS = 20.0
"""How long a rank that has failed may take to end: it prints, and calls what is registered for its end."""
_WELCOME_SECONDS = 10.0
_ASK_SECONDS = 8.0
"""How much later than it is due an answer of rank 0 may come."""
_FLUSH_SECONDS = 1.0
_AGENT_SECONDS = 1.0
"""How much later than the failing process others end under torchrun's agent, which blames the first, by the second."""
_GOODBYE_SECONDS = 2.0
_MAX_TEXT_CHARS = 1000
_LOOK_SECONDS = 0.25
_PLACES_PER_SECOND = 64
"""How many ranks a second tell rank 0 that they have come to another place; waiting ones say so once a beat."""
_STILL_SECONDS = 3.0
"""How long a rank stands still until it says that it waits."""


class StallTimer:
    """For how long a state has not changed."""

    def __init__(self) -> None:
        self._state: object = None
        self._since = 0.0

    def look(self, state: object, now: float) -> float:
        """Return for how many seconds the state has been the same; 0 while it is ``None``."""
        if state is None or state != self._state:
            self._state, self._since = state, now
        return now - self._since


class MonitorMember:
    """This process' connection to the monitor.

    Args:
        world: The world that is watched over.
        connection: A connection to the server.
        token: What the server expects to hear.
        server: The server, if it runs in this process.
        may_end_process: Whether this process ends when another rank fails.
        error_file: Where torchrun's agent expects the reason of a failure; ``None`` without an agent.
    """

    def __init__(
        self,
        world: World,
        connection: socket.socket,
        token: str,
        *,
        server: Server | None,
        may_end_process: bool,
        error_file: str | None,
    ) -> None:
        self._rank = world.rank
        self._timeout_seconds = world.timeout_seconds
        self._beat_seconds = beat_seconds(world.world_size)
        self._place_seconds = min(max(_LOOK_SECONDS, world.world_size / _PLACES_PER_SECOND), self._beat_seconds)
        self._ask_seconds = _ASK_SECONDS + answer_seconds(world.world_size)
        self._connection = connection
        self._server = server
        self._may_end_process = may_end_process
        self._error_file = error_file
        self._agent_seconds = 0.0 if error_file is None else _AGENT_SECONDS
        self._process = os.getpid()
        self._speaks = True  # until the server names the one rank of each host that does
        self._is_closing = self._is_off = self._is_ending = self._is_reporting = False
        self._failure: Mapping[str, Any] | None = None
        self._answers: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._loss: str | None = None
        self._welcomed, self._told = threading.Event(), threading.Event()
        self._send_lock, self._ask_lock = threading.Lock(), threading.Lock()
        self._recorder = FlightRecorder()
        self._recording = FlightRecord()
        self._recorded_state: object = None
        self._standstill = StallTimer()
        self._sent_at, self._sent_place = 0.0, _place()
        self.gone: dict[int, str] = {}
        """The ranks that had ended when rank 0 did, and how; empty while that serves."""
        self._thread = threading.Thread(target=self._listen, name="booster monitor", daemon=True)
        self._thread.start()
        self._send(type="hello", rank=self._rank, pid=self._process, token=token)

    @property
    def is_failing(self) -> bool:
        """Whether a rank has failed, so that this process is about to end; in a fork, which has nothing to close."""
        return self._failure is not None or self._is_reporting or os.getpid() != self._process

    def wait_for_welcome(self) -> bool:
        """Return whether the server has let this rank in."""
        return self._welcomed.wait(_WELCOME_SECONDS)

    def describe_missing(
        self, name: str, count: int, ranks: Sequence[int] | None, *, only_ended: bool = False
    ) -> str | None:
        """Say which ranks have not come to a call, and where they are; ``None`` where nobody knows.

        With ``only_ended``, say it of ranks that have ended normally; ``None`` where none has.
        """
        call, answer = Point(name, count, None if ranks is None else tuple(ranks)), None
        with self._ask_lock, contextlib.suppress(queue.Empty):
            if not self._is_off:
                self._tell("where", call=call)
                deadline = time.monotonic() + self._ask_seconds
                while (answer := self._answers.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                    if answer["call"] == [name, count]:  # else to a question that was given up
                        return str(answer["missing"]) if not only_ended else answer["ended"]
        if only_ended or (self._is_off and self._loss is None):
            return None
        return self._loss or f"rank 0, which knows where the others are, gave no answer within {self._ask_seconds:g} s."

    def hear_uncaught(self) -> Callable[[], None]:
        """Report exceptions that nobody catches; see `report_uncaught`."""
        return report_uncaught(self.report, self._wait_until_told)

    def report(self, error: BaseException) -> bool:
        """Tell the others of an exception that nobody caught; return whether to print its traceback.

        What another rank's end has caused is not: that rank's failure is printed instead.
        """
        # A call that timed out when a failure was known already is no second one.
        follows = is_consequence(error) or (self._failure is not None and isinstance(error, MissingRanksError))
        if follows and self._wait_until_told():
            time.sleep(self._agent_seconds)
            return False
        self._is_reporting = True
        text = f"{type(error).__name__}: {error}"
        self._write_error_file(text, "".join(traceback.format_exception(type(error), error, error.__traceback__)))
        self._tell("failed", text=_shortened(text))
        threading.Thread(target=self._end_failed, name="booster end", daemon=True).start()
        return True

    def _wait_until_told(self) -> bool:
        """Wait a little until every rank has heard of the first failure; return whether that is so."""
        return self._told.wait(_TOLD_SECONDS) and self._failure is not None

    def leave(self, error: BaseException | None, seconds: float) -> None:
        """Report how this process ends, unless the others have heard of it; wait for those that rank 0 serves.

        Args:
            error: The exception that ends it, printed by another excepthook; ``None`` where there is none.
            seconds: How long rank 0 waits for the others at most.
        """
        if error is not None:
            if self.report(error):
                self._wait_until_told()
            return
        self._end()
        deadline = time.monotonic() + seconds
        while self._server is not None and self._server.num_members > 1 and time.monotonic() < deadline:
            if self.is_failing:
                return
            time.sleep(0.01)

    def _end(self) -> None:
        """Say that this process makes no collective call any more, though it may wait for others to end."""
        if not self._is_ending and not self.is_failing:
            self._is_ending = True
            self._tell("ending", self._recorder.read())

    def close(self) -> None:
        """Say goodbye: this process ends normally, or at least by its own decision."""
        if self.is_failing:
            return  # the kernel closes the connection at the very end
        self._end()
        self._is_closing = True
        self._send(type="bye")
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            # What the server still sends is read: a connection that is reset would lose the goodbye.
            self._connection.shutdown(socket.SHUT_WR)
        self._thread.join(timeout=_GOODBYE_SECONDS)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=_GOODBYE_SECONDS)
        self._connection.close()

    def _listen(self) -> None:
        try:
            error = self._receive()
        except Exception:  # noqa: BLE001 - whatever it is, this rank goes on, and says that it is not watched any more
            say(
                f"Booster: the monitor of rank {self._rank} has stopped; if another rank dies, this one waits for it "
                f"until its time limit. The cause:\n{traceback.format_exc()}"
            )
        else:
            if not self._is_closing and self._failure is None:
                self._lose_server(error)
        self._turn_off()

    def _turn_off(self) -> None:
        """Let nobody wait for the server any more."""
        self._is_off = True
        self._answers.put(None)
        self._told.set()

    def _receive(self) -> OSError | None:
        """Act on what the server says until the connection ends; return the error with which it does."""
        pending = b""
        while True:
            has_more = is_readable(self._connection, _LOOK_SECONDS)
            self._look()
            if not has_more:
                continue
            try:
                data = self._connection.recv(1 << 16)
            except OSError as error:
                return error
            if not data:
                return None
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._handle(json.loads(line))

    def _look(self) -> None:
        """See whether this rank stands still, and say where it is: now and then, and more often where it waits."""
        now, place = time.monotonic(), _place()
        in_flight = self._recorder.numbers_in_flight()
        is_noted = PROGRESS.is_waiting or WAITS.is_in_one
        state = (place, PROGRESS.call, WAITS.number, is_noted, in_flight) if is_noted or in_flight else None
        seconds = self._standstill.look(state, now)
        if seconds < _STILL_SECONDS:
            self._recording, self._recorded_state, seconds = FlightRecord(), None, 0.0
        elif self._recorded_state != state:  # also where none is in flight: that others wait in one tells of a mismatch
            self._recording, self._recorded_state = self._recorder.read(), state
        if not is_noted and not self._recording.waits:
            seconds = 0.0
        if now >= self._sent_at + (self._beat_seconds if place == self._sent_place else self._place_seconds):
            self._sent_at, self._sent_place = now, place
            self._tell("here", self._recording, seconds)

    def _handle(self, message: Mapping[str, Any]) -> None:
        """Act on a message of the server."""
        kind = message["type"]
        if kind == "welcome":
            self._speaks = message["reports_for_host"]
            self._welcomed.set()
        elif kind == "missing":
            self._answers.put(message)
        elif kind == "closing":
            self._is_closing = True
            if message["cause"] is None:
                self.gone = {0: ENDED}
            elif self._speaks:
                say(f"Booster: the monitor on rank 0 has stopped, so nobody is watched: {message['cause']}\n")
            self._turn_off()
        elif kind == "failure" and self._may_end_process and not self._is_ending and self._failure is None:
            self._learn(message)

    def _lose_server(self, error: OSError | None) -> None:
        """Take the loss of rank 0 for a failure."""
        self._loss = describe_death(0, describe_loss(error, self._timeout_seconds))
        if self._may_end_process:
            place = _progress().describe_place()
            text = f"Booster: {self._loss}\nBooster: all ranks end. Rank {self._rank} {place}.\n"
            self._learn({"text": text, "reports_for_host": self._speaks})

    def _learn(self, failure: Mapping[str, Any]) -> None:
        """Say that a rank has failed, where that falls to this one, and see to it that this process ends."""
        self._failure = failure
        if failure["reports_for_host"]:
            say(failure["text"])
        self._told.set()
        if not self._is_reporting:
            threading.Thread(target=self._end_told, name="booster end", daemon=True).start()

    def _end_told(self) -> None:
        """End this process, which has learned of a failure, unless it has ended by itself in time."""
        time.sleep(GRACE_SECONDS + self._agent_seconds)
        if self._is_reporting:
            return  # the main thread ends by an exception of its own; see `_end_failed`
        if self._failure is not None:
            self._write_error_file(self._failure["text"].splitlines()[0], self._failure["text"])
        _end_process()

    def _end_failed(self) -> None:
        """End this process, whose main thread raised, unless it ends by itself; threads keep it for a short time."""
        begin, kept = time.monotonic(), StallTimer()
        while (now := time.monotonic()) < begin + _END_SECONDS:
            is_kept = not threading.main_thread().is_alive() and any(not t.daemon for t in threading.enumerate())
            if kept.look(is_kept or None, now) >= GRACE_SECONDS:
                break
            time.sleep(0.1)
        _end_process()

    def _write_error_file(self, summary: str, text: str) -> None:
        """Tell torchrun's agent the reason, in the form of torch.distributed.elastic's error files."""
        if self._error_file is None:
            return
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(self._error_file).write_text(
                json.dumps({"message": {"message": summary, "extraInfo": extra}}), encoding="utf-8"
            )

    def _tell(self, kind: str, recording: FlightRecord | None = None, seconds: float = 0.0, **message: Any) -> None:
        """Say something, and where this rank is when it is said: two threads do, and the last record is what counts."""
        with self._send_lock, contextlib.suppress(OSError):
            record = _progress(recording, seconds)
            self._connection.sendall(encode({"type": kind, "record": record, **message}))

    def _send(self, **message: Any) -> None:
        # A server that is gone is noticed by the thread that listens to it.
        with self._send_lock, contextlib.suppress(OSError):
            self._connection.sendall(encode(message))


def _place() -> object:
    """Return what changes when this process comes to another place."""
    return PROGRESS.last, PROGRESS.is_finished, PROGRESS.broken


def _progress(recording: FlightRecord | None = None, seconds: float = 0.0) -> Record:
    """Return how far this process has come."""
    recording, now = recording or FlightRecord(), time.monotonic()
    call, last, broken = PROGRESS.call, PROGRESS.last, PROGRESS.broken
    calls = [] if call is None else [_point(*call, PROGRESS.ranks)]
    if PROGRESS.is_waiting and last is not None and last != call:  # all ranks meet inside of the call
        calls.append(Point(*last))
    expired = (point for point, expiry in recording.waits.items() if expiry is not None and expiry <= now)
    return Record(
        counts={**PROGRESS.counts, **recording.counts},
        last=None if last is None else Point(*last),
        is_finished=PROGRESS.is_finished,
        waits=(*calls, *recording.waits),
        seconds=seconds,
        overdue=next(expired, None),
        knows_groups=recording.is_whole,
        broken=None if broken is None else _point(broken.name, broken.number, broken.ranks),
        error="" if broken is None else _shortened(broken.error),
    )


def _point(name: str, number: int, ranks: Sequence[int] | None) -> Point:
    return Point(name, number, None if ranks is None else tuple(ranks))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]} ..."


def _end_process() -> NoReturn:
    """End this process with what it has printed, unless the main thread hangs in printing."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(_FLUSH_SECONDS)
    os._exit(1)
