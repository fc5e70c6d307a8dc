"""Worker processes for `booster_testing.ranks`: started when needed, reused, and ended with the test session.

Worker ``i`` serves rank ``i`` of every call. A worker in an unknown state is replaced, never repaired.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_testing.rank_preload import VARIABLE
from booster_testing.rank_worker import CLOSE, serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

START_SECONDS = 180.0
"""Time limit for a worker to start, or to load a test's file, on a loaded machine."""

CLEAN_SECONDS = 20.0
"""Time limit for what a worker does after a call."""
_STACK_SECONDS = 2.0
_SHARED = ("numpy", "peft", "safetensors", "torch", "transformers")
"""Packages whose modules are imported before a fork, as ours are, where the test process has imported them."""
_STARTS_PROCESSES = ("torch._inductor",)
"""Modules that start processes or threads when they are imported."""
imported_first: list[str] = []
"""Modules that are imported before them."""


def can_fork() -> bool:
    """Return whether workers may be forks: CUDA does not survive a fork, and elsewhere torch's libraries may not."""
    return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


def _is_shared(name: str) -> bool:
    package = name.partition(".")[0]
    return (package in _SHARED or package.startswith("booster_")) and not name.startswith(_STARTS_PROCESSES)


def _start_process(target: Callable[..., object], *args: Any) -> BaseProcess:
    """Call a function in a new process: a fork of the one that imports what forks share, where workers may be that."""
    asked = {"OMP_NUM_THREADS": "1"}
    if can_fork() and forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined] # noqa: SLF001 - no public way to ask
        descriptor, asked[VARIABLE] = tempfile.mkstemp(prefix="ranks-")
        modules = [*imported_first, *sorted(filter(_is_shared, sys.modules)), "booster_testing.rank_worker"]
        with os.fdopen(descriptor, "w") as stream:
            json.dump({"path": sys.path, "modules": modules}, stream)
        forkserver.set_forkserver_preload(["booster_testing.rank_preload"])
    context: Any = multiprocessing.get_context("forkserver" if can_fork() else "spawn")
    process: BaseProcess = context.Process(target=target, args=args)
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return process


class RankError(Exception):
    """Raised if a function raises on some ranks; the message contains the traceback of each.

    Attributes:
        rank: The rank that failed first, not counting consequences of another rank's failure.
        exceptions: The exception of each rank that raised; ``None`` if it could not be pickled.
    """

    def __init__(self, message: str, rank: int, exceptions: dict[int, BaseException | None]) -> None:
        super().__init__(message)
        self.rank = rank
        self.exceptions = exceptions


class RankTimeoutError(RankError):
    """Raised if a function does not end in time on some ranks; the message contains their stacks."""


class RankDiedError(RankError):
    """Raised if a worker process ends while it runs a function; the message names the rank and the exit code."""


@dataclass
class Worker:
    """A worker process, the parent's end of its pipe, and the file for its stack dumps."""

    process: BaseProcess
    connection: Connection
    stack_file: Path

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def receive(self) -> tuple[str, Any]:
        """Return the worker's next message; raise EOFError if it has died."""
        try:
            message: tuple[str, Any] = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - our own child
        except OSError as error:
            raise EOFError from error
        return message

    def kill(self) -> None:
        """Kill the worker and its child processes, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):  # it may not have a group of its own yet
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def describe_death(self) -> str:
        """Return how the worker ended."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        if code is None:
            return "closed its connection to the test"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def queued_seconds(self) -> float:
        """Return for how long the worker's main thread has waited for a processor; 0 where the kernel does not tell."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{self.pid}/schedstat").read_text(encoding="ascii")
            return int(text.split()[1]) * 1e-9
        return 0.0

    def dump_stack(self) -> str:
        """Return the stacks of the worker's threads."""
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            previous, text = text, self.stack_file.read_text()
            if text and text == previous:
                return text
        return text or "its threads did not answer\n"


class Pool:
    """The worker processes of a test session."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._workers: list[Worker | None] = []
        self._num_started = 0
        self._num_calls = 0
        self.open_group: tuple[str, int] | None = None
        """Name and size of the group that calls share, while there is one."""

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return [worker.pid for worker in self._workers if worker is not None]

    def workers(self, num: int) -> list[Worker]:
        """Return ``num`` workers that are ready for a call; missing ones are started in parallel."""
        self._workers += [None] * (num - len(self._workers))
        new = []
        for rank, worker in enumerate(self._workers[:num]):
            if worker is None or worker.process.exitcode is not None:
                if worker is not None:
                    worker.kill()
                self._workers[rank] = self._start()
                new.append(rank)
        deadline = time.monotonic() + START_SECONDS
        for rank in new:
            worker = self._workers[rank]
            assert worker is not None
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                msg = f"the worker of rank {rank} did not start within {START_SECONDS:g} s"
                raise RankTimeoutError(msg, rank, {})
            try:
                worker.receive()
            except EOFError:
                msg = f"the worker of rank {rank} {worker.describe_death()} while it started"
                self.retire(rank)
                raise RankDiedError(msg, rank, {}) from None
        return [worker for worker in self._workers[:num] if worker is not None]

    def store_file(self) -> str:
        """Return the name of a new file for the store of a call."""
        self._num_calls += 1
        return str(Path(self._folder.name) / f"store{self._num_calls}")

    def close_group(self) -> dict[int, list[str]]:
        """Close the group that calls share, if there is one; return what each of its ranks left behind."""
        if self.open_group is None:
            return {}
        _, size = self.open_group
        self.open_group = None
        asked, leaks = [], {}
        for rank, worker in enumerate(self._workers[:size]):
            if worker is not None:
                with contextlib.suppress(OSError):  # its death is detected when it is needed
                    worker.connection.send_bytes(pickle.dumps(CLOSE))
                    asked.append(rank)
        deadline = time.monotonic() + CLEAN_SECONDS
        for rank in asked:
            worker = self._workers[rank]
            assert worker is not None
            leaks[rank] = ["a worker that did not close its group"]
            with contextlib.suppress(EOFError):
                if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                    leaks[rank] = worker.receive()[1]
            if leaks[rank]:
                self.retire(rank)
        return leaks

    def retire(self, rank: int) -> None:
        """End a rank's worker; the next call starts a new one."""
        worker = self._workers[rank]
        if worker is not None:
            worker.kill()
            self._workers[rank] = None

    def close(self) -> None:
        """End all workers and remove their files."""
        if os.getpid() != self._owner:
            return  # in a fork of the test process: the workers belong to its parent
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.connection.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + 3
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.kill()
        self._workers.clear()
        self._folder.cleanup()

    def _start(self) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        self._num_started += 1
        stack_file = Path(self._folder.name) / f"stack{self._num_started}"
        stack_file.touch()
        process = _start_process(serve, theirs, str(stack_file))
        theirs.close()
        return Worker(process, ours, stack_file)


_pool: Pool | None = None


def the_pool() -> Pool:
    """Return this process's pool; it is closed when the interpreter exits."""
    global _pool  # noqa: PLW0603 - workers are shared by all tests of a process
    if _pool is None:
        _pool = Pool()
        # Of multiprocessing, which waits for its processes before `atexit` has its turn, if that comes at all.
        util.Finalize(None, close_ranks, exitpriority=1)
    return _pool


def close_ranks() -> None:
    """End the worker processes, if there are any; the next call starts new ones."""
    global _pool  # noqa: PLW0603 - workers are shared by all tests of a process
    if _pool is not None:
        _pool.close()
        _pool = None


def worker_pids() -> list[int]:
    """Return the process ids of the running workers, and of those of multiprocessing that serve them."""
    served = [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]  # type: ignore[attr-defined] # noqa: SLF001 - it has no public name
    return [*filter(None, served), *([] if _pool is None else _pool.pids)]
