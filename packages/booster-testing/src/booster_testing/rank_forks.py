"""Fork the workers of `booster_testing.rank_pool` from one process that has imported torch and what the tests import.

A fork starts in milliseconds and shares the memory of the imported modules; a new interpreter imports them for seconds.
The first process runs nothing but imports, so no state of a test gets into a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHARED = ("numpy", "peft", "safetensors", "torch", "transformers")
"""Packages whose modules are imported before a fork, as ours are, where the test process has imported them."""
_STARTS_PROCESSES = ("torch._inductor",)
"""Modules that start processes or threads when they are imported."""
_MAX_MESSAGE_BYTES = 1 << 12


def can_fork() -> bool:
    """Return whether workers may be forks: CUDA does not survive a fork, and elsewhere torch's libraries may not."""
    return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


def _readable(descriptors: Sequence[int], timeout: float | None) -> list[int]:
    """Wait until one of some files can be read; return those that can. `select.select` takes none from 1,024 on."""
    with selectors.DefaultSelector() as selector:
        for each in descriptors:
            selector.register(each, selectors.EVENT_READ)
        return [key.fd for key, _ in selector.select(timeout)]


class ForkedProcess:
    """A fork of another process, with the methods of `subprocess.Popen` that the pool needs.

    Args:
        pid: Its process id.
        status_fd: A pipe that gets its exit code, as `subprocess.Popen` counts them.
    """

    def __init__(self, pid: int, status_fd: int) -> None:
        self.pid = pid
        self._status_fd = status_fd
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; ``None`` while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended.

        Raises:
            subprocess.TimeoutExpired: If it runs longer.
        """
        if self._code is None:
            if not _readable([self._status_fd], timeout):
                what = "a rank's worker"
                raise subprocess.TimeoutExpired(what, timeout or 0.0)
            status = os.read(self._status_fd, _MAX_MESSAGE_BYTES)
            os.close(self._status_fd)
            self._code = int(status) if status else -signal.SIGKILL  # with the process that it was forked from
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Forks:
    """The process that forks workers. It outlives these, since no state of a test gets into it.

    Args:
        first: Modules that are imported after torch and before those that this process has imported.
    """

    def __init__(self, first: Sequence[str] = ()) -> None:
        self._owner = os.getpid()
        life_read, self._life_write = os.pipe()  # closes when this process ends; the workers end then
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = "from booster_testing.rank_forks import main; main()"
        self._process = subprocess.Popen(  # noqa: S603 - our own process
            [sys.executable, "-c", command, str(theirs.fileno()), str(life_read)],
            pass_fds=(theirs.fileno(), life_read),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the test process only
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        os.close(life_read)
        assert self._process.stdin is not None
        with self._process.stdin as names, contextlib.suppress(BrokenPipeError):  # `fork` tells of its end
            modules = [*first, *sorted(filter(_is_shared, sys.modules))]
            names.write(json.dumps({"path": sys.path, "modules": modules}).encode())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fork(self, connection_fd: int, stack_file: Path, timeout_seconds: float) -> ForkedProcess:
        """Start a worker, whose end of the pipe is ``connection_fd``.

        Raises:
            OSError: If there is no answer in time.
        """
        status_fd, theirs = os.pipe()
        try:
            socket.send_fds(self._control, [os.fsencode(stack_file)], [connection_fd, theirs])
            self._control.settimeout(timeout_seconds)
            answer = self._control.recv(_MAX_MESSAGE_BYTES)
        finally:
            os.close(theirs)
        if not answer:
            os.close(status_fd)
            msg = f"the process that forks workers ended with exit code {self._process.wait()}"
            raise OSError(msg)
        return ForkedProcess(int(answer), status_fd)

    def close(self) -> None:
        """End the process and its forks."""
        if os.getpid() != self._owner:
            return  # in a fork of the test process, whose own it is
        os.close(self._life_write)
        self._control.close()
        self._process.kill()
        self._process.wait()


def _is_shared(name: str) -> bool:
    package = name.partition(".")[0]
    return (package in _SHARED or package.startswith("booster_")) and not name.startswith(_STARTS_PROCESSES)


def main() -> None:
    """Import modules and fork workers, as `Forks` asks, until that ends."""
    control, life_fd = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    gc.disable()  # nothing that is imported is garbage
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    _import_all(asked["modules"])
    from booster_testing import rank_worker

    gc.collect()
    gc.freeze()  # so that the forks' garbage collections leave the shared memory alone
    gc.enable()
    wake_fd = _wake_on_end_of_a_fork()
    status_fds: dict[int, int] = {}
    while True:
        ready = _readable([control.fileno(), wake_fd], None)
        if wake_fd in ready:
            os.read(wake_fd, _MAX_MESSAGE_BYTES)
            _report_ended(status_fds)
        if control.fileno() not in ready:
            continue
        stack_file, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 2)
        if not stack_file:
            return
        connection_fd, status_fd = descriptors
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # killpg reaches the worker's children, and not the other workers
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            for unused_fd in (wake_fd, status_fd, *status_fds.values()):
                os.close(unused_fd)
            rank_worker.serve(connection_fd, life_fd, os.fsdecode(stack_file))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # the interpreter's own end would copy all memory that forks share, for objects without a state
        os.setpgid(pid, pid)  # also here: the worker may be killed before it gets there
        os.close(connection_fd)
        status_fds[pid] = status_fd
        control.send(str(pid).encode())


def _import_all(names: list[str]) -> None:
    import torch
    import torch._dynamo  # every optimizer imports it
    import torch.distributed

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(Exception):  # the worker that needs it gets the error
                importlib.import_module(name)


def _wake_on_end_of_a_fork() -> int:
    """Return a descriptor that becomes readable when a fork ends."""
    wake_fd, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake_fd


def _report_ended(status_fds: dict[int, int]) -> None:
    """Send the exit codes of forks that have ended."""
    for pid in list(status_fds):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            status_fd = status_fds.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(status_fd, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(status_fd)
