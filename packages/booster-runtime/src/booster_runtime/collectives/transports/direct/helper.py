"""The thread that advances operations whose own rank is busy with something else."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class Advancing(Protocol):
        """Something with operations to advance: a channel."""

        def advance(self) -> bool:
            """Advance every operation, without waiting."""

        def has_work(self) -> bool:
            """Whether an operation is underway."""


_HELP_SECONDS = 0.02


class Helper:
    """Advances the operations of channels every 20 ms while there are any.

    Without it, a rank that waits in another library's barrier could block a rank that waits for it here.
    """

    def __init__(self) -> None:
        self._channels: weakref.WeakSet[Advancing] = weakref.WeakSet()
        self._wanted = threading.Event()
        self._pid = 0

    def watch(self, channel: Advancing) -> None:
        """Advance a channel's operations from now on, until there are none."""
        self._channels.add(channel)
        if self._pid != os.getpid():  # a forked process has no thread yet
            self._pid = os.getpid()
            self._wanted = threading.Event()
            threading.Thread(target=self._run, name="booster-direct-collectives", daemon=True).start()
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            time.sleep(_HELP_SECONDS)
            busy = [channel for channel in list(self._channels) if channel.has_work()]
            if not busy:
                self._wanted.clear()
            for channel in busy:
                try:
                    channel.advance()
                except RuntimeError:
                    self._channels.discard(channel)  # the thread that waits for the operation raises the error


HELPER = Helper()
