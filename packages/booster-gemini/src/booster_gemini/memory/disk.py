"""The last of the memories: one file per rank, read and written past the page cache by a few threads.

The file has no name: it goes with the process, however that ends, and nobody can remove or cut it behind our back.
Room is taken when a region is made, so that a full disk shows before anything has moved there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from booster_core.errors import OffloadError
from booster_runtime.memory import OffloadFolder, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_PIECE_BYTES = 8 << 20
_THREADS = 4


class Transfer:
    """A read or write that has been started; `wait` ends it and raises what went wrong."""

    def __init__(self, parts: Sequence[Future[None]], keep: object = None) -> None:
        self._parts = list(parts)
        self._keep = keep

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Return once all bytes have been moved.

        Raises:
            OffloadError: If the file could not be read or written.
        """
        wait(self._parts)
        parts, self._parts, self._keep = self._parts, [], None
        for part in parts:
            part.result()

    def abandon(self) -> None:
        """Return once nothing is moved any more, whatever came of it; parts that have not begun are left out."""
        for part in self._parts:
            part.cancel()
        wait(self._parts)
        self._parts, self._keep = [], None


class DiskStore:
    """Regions of bytes in a file of this process alone.

    Args:
        folder: A folder of this host, on a disk.
        option: The option that named the folder, for errors.

    Attributes:
        is_direct: Whether transfers pass the page cache by.
        bytes_read: Bytes read so far.
        bytes_written: Bytes written so far.

    Raises:
        ConfigError: If the folder is not there, is none, or can't be written to.
    """

    def __init__(self, folder: str | os.PathLike[str], *, option: str = "offload_dir") -> None:
        self._folder = OffloadFolder(folder, option=option)
        self._file, self.is_direct = self._open()
        self._close = weakref.finalize(self, os.close, self._file)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="gemini disk")
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self.bytes_read = self.bytes_written = 0

    def _open(self) -> tuple[int, bool]:
        self._folder.check_exists()
        direct = getattr(os, "O_DIRECT", 0)
        try:
            descriptor, name = tempfile.mkstemp(prefix="booster-", suffix=".chunks", dir=self._folder.folder)
            try:
                if direct:
                    with contextlib.suppress(OSError):  # a file system without direct I/O
                        opened = os.open(name, os.O_RDWR | os.O_CLOEXEC | direct)
                        os.close(descriptor)
                        return opened, True
                return descriptor, False
            finally:
                Path(name).unlink()
        except OSError as cause:
            raise self._folder.not_writable(cause) from cause

    def allocate(self, num_bytes: int) -> int:
        """Take room for a region and return its offset.

        Args:
            num_bytes: Length of the region; rounded up to whole sectors.

        Raises:
            OffloadError: If the disk is full.
        """
        length = aligned(num_bytes)
        free = self._free.get(length)
        if free:
            return free.pop()
        offset = self._end
        try:
            self._folder.take_room(self._file, offset, length)
        except OSError as cause:
            raise OffloadError(self._shortage(length, cause)) from cause
        self._end += length
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Give a region back, for others of its length."""
        self._free.setdefault(aligned(num_bytes), []).append(offset)

    def write(self, offset: int, buffer: Tensor, after: Callable[[], None] | None = None) -> Transfer:
        """Start writing a buffer to a region.

        Args:
            offset: Where, as `allocate` returned.
            buffer: 1-D uint8 on the CPU, of whole sectors, at an address that is a multiple of `ALIGNMENT`; left
                alone until the transfer has ended.
            after: Called by each thread that takes part before it begins; for what must end first.
        """
        return self._start(self._write, offset, buffer, after)

    def read(self, offset: int, buffer: Tensor, after: Callable[[], None] | None = None) -> Transfer:
        """Start reading a region into a buffer; see `write`."""
        return self._start(self._read, offset, buffer, after)

    def _start(
        self,
        move: Callable[[int, memoryview], None],
        offset: int,
        buffer: Tensor,
        after: Callable[[], None] | None,
    ) -> Transfer:
        view = memoryview(buffer.numpy())  # type: ignore[arg-type] # numpy's stubs for Python before 3.12

        def part(start: int) -> None:
            if after is not None:
                after()
            move(offset + start, view[start : start + _PIECE_BYTES])

        starts = range(0, len(view), _PIECE_BYTES)
        return Transfer([self._pool.submit(part, start) for start in starts], keep=buffer)

    def _write(self, offset: int, view: memoryview) -> None:
        if hasattr(os, "posix_fallocate") and os.fstat(self._file).st_size < offset + len(view):
            raise OffloadError(self._cut("written", offset, len(view)))  # it would be long again, and empty
        position = 0
        while position < len(view):
            try:
                count = os.pwrite(self._file, view[position:], offset + position)
            except OSError as cause:
                if cause.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise OffloadError(self._shortage(len(view), cause)) from cause
                raise OffloadError(self._trouble("written", offset, len(view), cause.strerror)) from cause
            position += count
        with self._lock:
            self.bytes_written += len(view)

    def _read(self, offset: int, view: memoryview) -> None:
        position = 0
        while position < len(view):
            try:
                count = os.preadv(self._file, [view[position:]], offset + position)
            except OSError as cause:
                raise OffloadError(self._trouble("read", offset, len(view), cause.strerror)) from cause
            if count == 0:
                raise OffloadError(self._cut("read", offset, len(view)))
            position += count
        with self._lock:
            self.bytes_read += len(view)

    def _cut(self, what: str, offset: int, length: int) -> str:
        reason = f"the file ends at byte {os.fstat(self._file).st_size}, so somebody has cut it"
        return self._trouble(what, offset, length, reason)

    def _trouble(self, what: str, offset: int, length: int, reason: str | None) -> str:
        return (
            f"{length} bytes at offset {offset} of the offloaded chunks in {self._folder.asked} could not "
            f"be {what}: {reason}. Start again from the last checkpoint, on a disk that works."
        )

    def _shortage(self, num_bytes: int, cause: OSError) -> str:
        return (
            f"Offloading to {self._folder.asked} needs {num_bytes} more bytes, and {self._folder.told_free_bytes()} "
            f"({cause.strerror}). Nothing is lost: what should have moved there is still in memory, and can be saved. "
            "Make room, or name another folder."
        )

    def close(self) -> None:
        """End the threads, and give the file's room back."""
        self._pool.shutdown(wait=True)
        self._close()
        self._file = -1  # the number may be given to another file
