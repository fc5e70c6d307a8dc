"""Writing in the background: one thread that writes a snapshot of the state, and keeps its error.

The thread uses no process group that training uses; it agrees with its peers over the store. There is one job at a
time: memory stays at one copy.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from booster_core.ranks import Meetings, current_world

if TYPE_CHECKING:
    from collections.abc import Callable


class BackgroundWriter:
    """Runs one job at a time in a thread, and keeps its error until somebody asks.

    Attributes:
        is_started: Whether there is a job to `join`.
    """

    def __init__(self) -> None:
        self.is_started = False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._name = ""
        self._lock = threading.Lock()
        self._followers: list[Callable[[], object]] = []
        self._is_over = True
        self._meetings: Meetings | None = None
        self._waits_at_exit = False

    def start(self, name: str, work: Callable[[], object]) -> None:
        """Run ``work`` in a thread. The job before it has been waited for.

        Collective: none, but every rank starts the same jobs.
        """
        assert self._thread is None, "the job before was waited for"
        self.is_started = True
        self._name, self._error = name, None
        self._followers, self._is_over = [], False
        self._meetings = meetings = Meetings(f"job {next(current_world().jobs)}")

        def run() -> None:
            try:
                with meetings.in_this_thread():
                    work()
                    self._call_followers()
            except Exception as error:  # noqa: BLE001 - kept for the next call, which raises it on every rank
                with self._lock:
                    self._error, self._is_over = error, True

        # Not a daemon: the interpreter joins it before it ends, so that a last save is not lost. Uploads need pools of
        # threads, which end before that, unless this is called first; what is registered last is called first.
        if not self._waits_at_exit and hasattr(threading, "_register_atexit"):
            threading._register_atexit(self.settle)  # noqa: SLF001 - how pools of threads do it
            self._waits_at_exit = True
        self._thread = threading.Thread(target=run, name=f"booster {name}")
        self._thread.start()
        atexit.register(self._at_exit)

    def follow(self, call: Callable[[], object]) -> None:
        """Call something when the job has ended well: in its thread, or at once where it has ended already."""
        with self._lock:
            if not self._is_over:
                self._followers.append(call)
                return
            failed = self._error is not None
        if not failed:
            with contextlib.nullcontext() if self._meetings is None else self._meetings.in_this_thread():
                call()  # meets those ranks whose job still goes on

    def _call_followers(self) -> None:
        while True:
            with self._lock:
                if not self._followers:
                    self._is_over = True
                    return
                call = self._followers.pop(0)
            call()

    def settle(self) -> None:
        """Wait for the job, if there is one, and leave its error for the next `join`."""
        if self._thread is not None:
            self._thread.join()

    def join(self) -> Exception | None:
        """Wait for the job, if there is one, and return its error, if it has one; then forget both."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, self.is_started = None, False
        atexit.unregister(self._at_exit)
        error, self._error = self._error, None
        if error is not None:
            with contextlib.suppress(AttributeError):  # Python 3.10 has no notes
                error.add_note(f"(from `{self._name}(use_async=True)`, which went on in the background)")
        return error

    def _at_exit(self) -> None:
        """Report an error that nobody asked for, and let the process fail for it."""
        error = self.join()
        if error is None:
            return
        print(f"`{self._name}(use_async=True)` failed in the background:", file=sys.stderr)  # noqa: T201 - the last way to tell
        traceback.print_exception(type(error), error, error.__traceback__)
        # An exception raised here would leave the exit code at 0, and whoever started the run would think all is saved.
        atexit._run_exitfuncs()  # noqa: SLF001 - what the interpreter would go on with
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
