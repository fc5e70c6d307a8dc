"""Each rank's end of the monitor: reports this process' failure, and ends it for another's.

The thread here acts whatever the main thread does, also while that sleeps or waits in a collective's C++ code. The main
thread gets a short time to end by itself first. Nothing is done about exceptions that a script catches.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from booster_core.errors import RankFailedError
from booster_core.ranks import LOST_PEER, PROGRESS
from booster_runtime.liveness.exits import FailedExit, failed_exit
from booster_runtime.liveness.server import Server
from booster_runtime.liveness.verdicts import DISAGREE
from booster_runtime.liveness.wire import (
    FROM_SERVER,
    Lines,
    Message,
    encode,
    is_unreachable,
    keep_from_children,
    outlast_interruptions,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from booster_core.ranks import World

GRACE_SECONDS = 5.0
"""How long the main thread may take to end by itself when another rank has failed."""

NOT_WANTED = "it is turned off"
"""Why there is no monitor, where that is as it should be."""

_DECISION_SECONDS = 4.0
_TURN_SECONDS = GRACE_SECONDS + 3.0
_REAPED_SECONDS = 1.0
_END_SECONDS = 20.0
_CONNECT_SECONDS = 10.0
_ALL_SECONDS = 2 * _CONNECT_SECONDS
_ASK_SECONDS = 4.0
_FLUSH_SECONDS = 1.0
_MAX_TEXT_CHARS = 60_000
_MAX_LINE_BYTES = 1 << 26
"""Longest line of the server, in which every rank may have a record."""
_LOOK_SECONDS = 1.0
_IDLE_SECONDS = 3.0
_IDLE_SHARE = 0.3
"""Share of a processor that threads take which only wait, at most."""


class Monitor:
    """This process' connection to the monitor.

    Args:
        rank: This process' rank.
        connection: A connection to the server.
        token: What the server expects to hear.
        server: The server, if it runs in this process.
        may_end_process: Whether this process ends when another rank fails.
        error_file: Where torchrun's agent expects the reason of a failure; ``None`` without an agent.
        timeout_seconds: How long rank 0 is waited for when it can't be reached.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        token: str,
        *,
        server: Server | None,
        may_end_process: bool,
        error_file: str | None,
        timeout_seconds: float,
    ) -> None:
        self._rank = rank
        self._connection = connection
        self._server = server
        self._may_end_process = may_end_process
        self._error_file = error_file
        self._is_heir = True  # until the server, if it lives to, names the one rank that speaks for it
        self._is_closing = False
        self._is_off = False
        self._is_ending = False
        self._timeout_seconds = timeout_seconds
        self._gone: dict[int, str] = {}
        self._failure: Message | None = None
        self._decided, self._turn, self._answered = threading.Event(), threading.Event(), threading.Event()
        self._welcomed = threading.Event()
        self._records: dict[int, Message] = {}
        self._send_lock, self._speech_lock = threading.Lock(), threading.Lock()
        self._has_spoken = False
        self._is_reporting = False
        self._thread = threading.Thread(target=self._listen, name="booster monitor", daemon=True)
        self._thread.start()
        self._send({"type": "hello", "rank": rank, "pid": os.getpid(), "token": token})

    @property
    def is_failing(self) -> bool:
        """Whether a rank has failed, so that this process is about to end."""
        return self._failure is not None or self._is_reporting

    def wait_for_welcome(self) -> bool:
        """Return whether the server has let this rank in."""
        return self._welcomed.wait(_CONNECT_SECONDS)

    def ask_progress(self) -> dict[int, Message] | None:
        """Return every rank's progress record, or ``None`` if the server does not answer.

        Where the server has ended normally, only the ranks that had ended by then are known.

        Collective: none.
        """
        self._answered.clear()
        if self._is_off:
            return {rank: {"gone": how} for rank, how in self._gone.items()} or None
        self._send({"type": "where"})
        return dict(self._records) if self._answered.wait(_ASK_SECONDS) else None

    @property
    def gone(self) -> dict[int, str]:
        """The ranks that had ended when rank 0 did, and how; empty while that serves."""
        return self._gone

    def end(self) -> None:
        """Say that this process makes no collective call any more, though it may wait for others to end."""
        if not self._is_ending and not self.is_failing:
            self._is_ending = True
            self._send({"type": "ending", "record": PROGRESS.record()})

    def wait_for_others(self, seconds: float) -> None:
        """Wait on the rank that serves the others until they are gone; for at most so long, and not after a failure."""
        deadline = time.monotonic() + seconds
        while self._server is not None and not self.is_failing and time.monotonic() < deadline:
            if self._server.num_members <= 1:
                return
            time.sleep(0.01)

    def hear_uncaught(self) -> Callable[[], None]:
        """Report exceptions that nobody catches; see `install_excepthook`."""
        return install_excepthook(self)

    def leave(self, error: BaseException | None, seconds: float) -> None:
        """Report how this process ends, unless the others have heard of it; wait for those that rank 0 serves.

        Args:
            error: The exception that ends it, printed by somebody else's excepthook; ``None`` where there is none.
            seconds: How long rank 0 waits for the others at most.
        """
        end = failed_exit()
        if error is not None:
            self.report(error, error.__traceback__)
        elif end is not None:
            self.report_exit(end)
        else:
            self.end()
            self.wait_for_others(seconds)

    def close(self) -> None:
        """Say goodbye: this process ends normally, or at least by its own decision."""
        if self.is_failing:
            return  # the kernel closes the connection at the very end, which is when the others may go on
        self.end()
        self._is_closing = True
        self._send({"type": "bye"})
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)
        self._connection.close()

    def report(self, error: BaseException, trace: TracebackType | None) -> bool:
        """Report an exception that nobody caught; return whether its traceback is to be printed here, now.

        Waits for the decision whether this is the first failure, and for this process' turn to end.

        Collective: none.
        """
        text = "".join(traceback.format_exception(type(error), error, trace))
        return self._report(
            f"{type(error).__name__}: {error}",
            text,
            is_derived=_is_consequence(error),
            waits=not isinstance(error, KeyboardInterrupt),
        )

    def report_exit(self, end: FailedExit) -> None:
        """Report that this process ends by `sys.exit` with a failure's code, and say so where that is the first.

        Waits as `report` does.

        Collective: none.
        """
        summary = f"`sys.exit({end.code!r})` was called at {end.place}."
        error = end.__context__
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__)) if error else ""
        if self._report(summary, f"{text}{summary}\n", is_derived=error is not None and _is_consequence(error)):
            _flush()
            say(f"Booster: rank {self._rank} failed; all other ranks end. {summary}\n")

    def _report(self, summary: str, text: str, *, is_derived: bool, waits: bool = True) -> bool:
        """Tell the others of this process' failure; return whether it is to be told here, too."""
        self._is_reporting = True
        half = _MAX_TEXT_CHARS // 2
        shortened = text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"
        self._send({"type": "failed", "text": shortened, "is_derived": is_derived})
        threading.Thread(target=self._end_after_report, name="booster end", daemon=True).start()
        if not waits:
            return True
        self._decided.wait(_DECISION_SECONDS)
        if self._failure is None:
            self._write_error_file(summary, text)
            return True
        if self._failure["own"]:
            self._write_error_file(summary, text)
            self._wait_for_turn()
            return True
        self._wait_for_turn()
        self._speak()
        return False

    def _end_after_report(self) -> None:
        """End a process that has failed but whose other threads do not let it end."""
        time.sleep(_END_SECONDS)
        _end_process()

    def _listen(self) -> None:
        try:
            how = self._receive()
        except Exception:  # noqa: BLE001 - whatever it is, this rank goes on, and says that it is not watched any more
            self._is_off = True
            say(
                f"Booster: the monitor of rank {self._rank} has stopped; if another rank dies, this one waits for it "
                f"until its time limit. The cause:\n{traceback.format_exc()}"
            )
            return
        if not self._is_closing:
            self._server_is_gone(how)

    def _receive(self) -> str:
        """Act on what the server says until its connection ends, and return how it ended."""
        lines = Lines(FROM_SERVER, _MAX_LINE_BYTES)
        idleness = Idleness()
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        with selector:
            return self._receive_from(selector, lines, idleness)

    def _receive_from(self, selector: selectors.BaseSelector, lines: Lines, idleness: Idleness) -> str:
        while True:
            is_readable = bool(selector.select(_LOOK_SECONDS))
            seconds = idleness.look(PROGRESS.call, time.monotonic(), _busy_seconds(), is_waiting=PROGRESS.is_waiting)
            if seconds >= _IDLE_SECONDS:
                self._send({"type": "waiting", "record": PROGRESS.record(), "seconds": seconds})
            if not is_readable:
                continue
            try:
                data = self._connection.recv(65536)
            except OSError as error:
                if is_unreachable(error):
                    return f"could not be reached for {self._timeout_seconds:g} s"
                return "has died"
            for message in lines.feed(data, self._complain):
                self._handle(message)
            if not data:
                return "has died"

    def _complain(self, problem: ValueError) -> None:
        if self._welcomed.is_set():  # else somebody else's port, which is told where nobody was let in
            say(f"Booster: the monitor of rank {self._rank} ignores a message of rank 0: {problem}\n")

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        if kind == "welcome":
            self._is_heir = bool(message["is_heir"])
            self._welcomed.set()
        elif kind == "where":
            self._send({"type": "here", "question": message["question"], "record": PROGRESS.record()})
        elif kind == "progress":
            self._records = {int(rank): record for rank, record in message["records"].items()}
            self._answered.set()
        elif kind == "closing":
            self._is_closing = True
            self._is_off = True
            self._gone = {int(rank): how for rank, how in message["gone"].items()}
            self._gone.setdefault(0, "has ended normally")
            if message["cause"] is not None:
                del self._gone[0]
                if self._is_heir:
                    say(f"Booster: the monitor on rank 0 has stopped: {message['cause']}\n")
        elif kind == "go":
            self._turn.set()
        elif kind == "failure" and self._may_end_process and not self._is_ending:
            self._learn(message)

    def _server_is_gone(self, how: str) -> None:
        """Rank 0 has ended without a goodbye, or can't be reached; if that is news, it is the failure."""
        self._turn.set()
        if self._failure is None and self._may_end_process:
            self._learn(
                {"rank": 0, "world": None, "host": None, "pid": None, "how": how, "text": None}
                | {"speaks": self._is_heir, "waits": False, "own": False}
            )

    def _learn(self, failure: Message) -> None:
        """Take note of the failure, and see to it that this process ends."""
        self._failure = failure
        if not failure["waits"]:
            self._turn.set()
        self._decided.set()
        if not self._is_reporting:
            threading.Thread(target=self._end_for_another, name="booster end", daemon=True).start()

    def _end_for_another(self) -> None:
        """Give the main thread time to end by itself; then end the process."""
        deadline = time.monotonic() + GRACE_SECONDS
        self._wait_for_turn()
        time.sleep(max(0.0, deadline - time.monotonic()))
        if self._failure is not None and self._failure["rank"] == 0 and self._failure["world"] is None:
            time.sleep(_REAPED_SECONDS)  # nobody tells when the others are gone, and the heir speaks last
        if self._is_reporting:
            return  # it has an exception of its own by now, and ends by that
        self._speak()
        _end_process()

    def _wait_for_turn(self) -> None:
        self._turn.wait(_TURN_SECONDS)
        if self._error_file is not None and self._failure is not None and not self._failure["speaks"]:
            time.sleep(_REAPED_SECONDS)  # the agent is to see the end of the process that speaks before this one's

    def _speak(self) -> None:
        """Print what happened to the rank that failed, if that falls to this process."""
        failure = self._failure
        with self._speech_lock:
            if failure is None or not failure["speaks"] or self._has_spoken:
                return
            self._has_spoken = True
        _flush()
        text = _obituary(failure)
        self._write_error_file(text.rstrip().splitlines()[-1], text)
        say(text)

    def _write_error_file(self, summary: str, text: str) -> None:
        """Tell torchrun's agent the reason, in the form of torch.distributed.elastic's error files."""
        if self._error_file is None:
            return
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(self._error_file).write_text(
                json.dumps({"message": {"message": summary, "extraInfo": extra}}), encoding="utf-8"
            )

    def _send(self, message: Message) -> None:
        # A server that is gone is noticed by the thread that listens to it.
        with self._send_lock, contextlib.suppress(OSError):
            self._connection.sendall(encode(message))


class Idleness:
    """How long this process has done next to nothing in one call."""

    def __init__(self) -> None:
        self._call: tuple[str, int] | None = None
        self._since = self._at = self._busy = 0.0

    def look(self, call: tuple[str, int] | None, now: float, busy: float, *, is_waiting: bool) -> float:
        """Return for how many seconds it has been idle in ``call``, as seen about once a second.

        Args:
            call: The call that the process is in.
            now: Seconds on any clock.
            busy: Seconds for which it has computed, or could have.
            is_waiting: Whether it is known to wait for other ranks.
        """
        if call is None or call != self._call:
            self._call, self._since, self._at, self._busy = call, now, now, busy
            return 0.0
        if now - self._at >= _LOOK_SECONDS / 2:
            if not is_waiting and busy - self._busy > _IDLE_SHARE * (now - self._at):
                self._since = now
            self._at, self._busy = now, busy
        return self._at - self._since


def _busy_seconds() -> float:
    """Return for how long this process has computed, and its main thread has waited for a processor to."""
    queued = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        queued = int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    return time.process_time() + queued


def start_monitor(
    world: World,
    hosts: Sequence[str] | None,
    address: str,
    *,
    may_end_process: bool,
    error_file: str | None = None,
    is_wanted: bool = True,
) -> Monitor | None:
    """Connect this rank to the monitor, which rank 0 starts.

    Args:
        world: The world to watch over; ``unwatched_because`` tells why this rank has no monitor.
        hosts: Host names of all ranks, on rank 0; not looked at elsewhere.
        address: A name of rank 0's host, as rank 0 knows it.
        may_end_process: Whether this process ends when another rank fails.
        error_file: Where torchrun's agent expects the reason of a failure.
        is_wanted: Whether this rank takes part; where rank 0 does not, none does.

    Returns:
        The monitor; ``None`` where a rank could not reach it, and in a world of one.

    Collective: every rank of the world.
    """
    PROGRESS.clear()
    if world.world_size == 1 or world.store is None:
        return None
    server = None
    if world.rank == 0:
        assert hosts is not None
        server, news = _start_server(world, hosts, address, speakers_end_first=error_file is not None, is_on=is_wanted)
        world.store.set("monitor", json.dumps(news))
    where = json.loads(world.store.get("monitor"))
    monitor, connection = None, None
    problem = where.get("problem") or (None if is_wanted else NOT_WANTED)
    if problem is None:
        connection, problem = _connect(where["addresses"], where["port"], world.timeout_seconds)
    if connection is not None:
        monitor = Monitor(
            world.rank,
            connection,
            where["token"],
            server=server,
            may_end_process=may_end_process,
            error_file=error_file,
            timeout_seconds=world.timeout_seconds,
        )
        if not monitor.wait_for_welcome():
            problem = f"rank 0 did not answer within {_CONNECT_SECONDS:g} s, or did not let it in"
    _wait_for_all(world)
    world.unwatched_because = problem
    if problem is None:
        return monitor
    if monitor is not None:
        monitor.close()
    elif server is not None:
        server.close()
    return None


def _start_server(
    world: World, hosts: Sequence[str], address: str, *, speakers_end_first: bool, is_on: bool
) -> tuple[Server | None, Message]:
    """Return the server, started, and what the others are told of it: where it is, or why there is none."""
    if not is_on:
        return None, {"problem": NOT_WANTED}
    token = secrets.token_hex(16)
    try:
        server = Server(hosts, token, speakers_end_first=speakers_end_first, timeout_seconds=world.timeout_seconds)
    except OSError as error:
        return None, {"problem": f"rank 0 could not start it: {error}"}
    server.start()
    addresses = ["127.0.0.1"] if len(set(hosts)) == 1 else [address, socket.gethostname()]
    return server, {"addresses": addresses, "port": server.port, "token": token}


def _wait_for_all(world: World) -> None:
    """Let every rank come under watch before any goes on: a failure would miss those that come later."""
    from torch.distributed import DistStoreError

    assert world.store is not None
    if world.store.add("monitored", 1) == world.world_size:
        world.store.set("all monitored", "")
    limit = min(_ALL_SECONDS, world.timeout_seconds)
    with contextlib.suppress(DistStoreError):  # a late one is watched from when it comes
        world.store.wait(["all monitored"], timedelta(seconds=limit))


def install_excepthook(monitor: Monitor) -> Callable[[], None]:
    """Report exceptions that nobody catches before the present hook prints them, where it is to.

    Returns:
        What puts the present hook back.

    Collective: none.
    """
    previous, owner = sys.excepthook, os.getpid()

    def report_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_to_be_printed = True
        if os.getpid() != owner:  # a fork, whose errors are its own
            previous(kind, error, trace)
            return
        # Nothing may keep the user's traceback from the screen.
        with contextlib.suppress(Exception):
            is_to_be_printed = monitor.report(error, trace)
        if is_to_be_printed:
            _flush()
            previous(kind, error, trace)

    def uninstall() -> None:
        if sys.excepthook is report_and_print:  # else somebody has wrapped it, and may call it yet
            sys.excepthook = previous

    sys.excepthook = report_and_print
    return uninstall


def _connect(addresses: Sequence[str], port: int, timeout_seconds: float) -> tuple[socket.socket | None, str | None]:
    """Return a connection to the server, or why there is none."""
    problems = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            problems.append(f"{address}:{port}: {error}")
            continue
        connection.settimeout(None)
        outlast_interruptions(connection, timeout_seconds)
        keep_from_children(connection)
        return connection, None
    return None, f"it could not be reached at {'; '.join(problems)}"


def _is_consequence(error: BaseException) -> bool:
    """Whether an exception looks as if another rank's end had caused it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RankFailedError) or LOST_PEER.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def _obituary(failure: Message) -> str:
    """Say what happened to a rank that cannot say it on this screen."""
    of = "" if failure["world"] is None else f" of {failure['world']}"
    where = "" if failure["host"] is None else f" (process {failure['pid']} on {failure['host']})"
    if failure["how"] == DISAGREE:
        return f"Booster: {failure['text']} All ranks end.\n"
    if failure["text"] is None and failure["how"] != "has died":
        return (
            f"Booster: rank {failure['rank']}{of}{where} {failure['how']}: its machine or the network is down. All "
            "other ranks end.\n"
        )
    if failure["text"] is None:
        return (
            f"Booster: rank {failure['rank']}{of}{where} died without a traceback: killed by a signal, by the system "
            "for want of memory, or ended by its own code. All other ranks end.\n"
        )
    return f"Booster: rank {failure['rank']}{of}{where} failed; all other ranks end. Its traceback:\n{failure['text']}"


def _flush() -> None:
    """Flush what was printed, unless the main thread is stuck in printing."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(_FLUSH_SECONDS)


def _end_process() -> NoReturn:
    _flush()
    os._exit(1)
