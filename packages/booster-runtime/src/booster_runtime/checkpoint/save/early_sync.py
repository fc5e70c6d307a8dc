"""`EarlySync`: what is written goes to disk while more is written, which leaves little to wait for at the end."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_EVERY_BYTES = 32 << 20
_to_disk = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class EarlySync:
    """A thread that puts a file on disk each time that some more was written to it.

    The system tells of a failed write to disk once, to whoever waits for it first: `close` raises what it told here.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint early sync")
        self._running: Future[None] | None = None
        self._descriptor, self._num_bytes = -1, 0

    def note(self, descriptor: int, num_bytes: int) -> None:
        """Take note of a write.

        Args:
            descriptor: Of the file, open.
            num_bytes: How much was written.

        Raises:
            OSError: If what was written before could not be put on disk.

        Collective: none.
        """
        if descriptor != self._descriptor:
            self._descriptor, self._num_bytes = descriptor, 0
        self._num_bytes += num_bytes
        if self._num_bytes < _EVERY_BYTES or (self._running is not None and not self._running.done()):
            return
        self._settle()
        self._num_bytes = 0
        self._running = self._pool.submit(_sync, os.dup(descriptor))  # the writer may close its own meanwhile

    def close(self) -> None:
        """Wait for what is under way.

        Raises:
            OSError: As `note` does.

        Collective: none.
        """
        self._pool.shutdown()
        self._settle()

    def abandon(self) -> None:
        """Wait for what is under way, whatever comes of it.

        Collective: none.
        """
        self._pool.shutdown()

    def _settle(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.abandon() if kind is not None else self.close()


def _sync(descriptor: int) -> None:
    try:
        _to_disk(descriptor)
    finally:
        os.close(descriptor)
