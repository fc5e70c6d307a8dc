"""A disk as the place of blocks: one file per rank, read and written past the page cache by a few threads.

The file has no name: it goes with the process, however that ends, and nobody can remove or cut it behind our back.
Room is taken when a region is made, so that a full disk shows before anything has moved there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Literal

from booster_core.errors import OffloadError
from booster_runtime.memory import OffloadFolder, aligned

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from booster_gemini.memory.ring import Copies, Ring

_PIECE_BYTES = 8 << 20
_THREADS = 4


class DiskStore:
    """Regions of bytes in a file of this process alone.

    Args:
        folder: A folder of this host, on a disk: the option `offload_dir`.

    Attributes:
        moved_bytes: How many were begun to be ``"read"`` and ``"written"``.

    Raises:
        ConfigError: If the folder is not there, is none, or can't be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = OffloadFolder(folder, option="offload_dir")
        self._folder.check_exists()
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder.folder)  # noqa: SIM115 - until `close`
        except OSError as cause:
            raise self._folder.not_writable(cause) from cause
        self._close = weakref.finalize(self, self._file.close)
        with contextlib.suppress(AttributeError, OSError):  # a system, or a file system, without direct I/O
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_DIRECT)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="gemini disk")
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self.moved_bytes = {"read": 0, "written": 0}

    def allocate(self, num_bytes: int) -> int:
        """Take room for a region of whole sectors and return its offset.

        Raises:
            OffloadError: If the disk is full.
        """
        length = aligned(num_bytes)
        if free := self._free.get(length):
            return free.pop()
        try:
            self._folder.take_room(self._file.fileno(), self._end, length)
        except OSError as cause:
            raise self._shortage(length, cause) from cause
        self._end += length
        return self._end - length

    def free(self, offset: int, num_bytes: int) -> None:
        """Give a region back, for others of its length."""
        self._free.setdefault(aligned(num_bytes), []).append(offset)

    def move(
        self, what: Literal["read", "written"], offset: int, buffer: Tensor, after: Callable[[], None] | None = None
    ) -> list[Future[None]]:
        """Start moving a region to or from a buffer of whole sectors; results of what is returned may raise.

        Args:
            what: What happens to the region, which `allocate` has returned.
            offset: Where it begins.
            buffer: 1-D uint8 on the CPU, at an address that is a multiple of `ALIGNMENT`.
            after: Called by each thread that takes part before it begins; for what must end first.

        Raises:
            OffloadError: By the results, if the disk is full or fails.
        """
        self.moved_bytes[what] += buffer.numel()
        call, view = (os.preadv if what == "read" else os.pwritev), memoryview(buffer.numpy())  # type: ignore[arg-type] # numpy's stubs for Python before 3.12

        def part(start: int, end: int) -> None:
            if after is not None:
                after()
            while start < end:
                if (size := os.fstat(self._file.fileno()).st_size) < offset + end:  # writing would refill it
                    raise self._trouble(what, offset, end, f"the file ends at byte {size}, so somebody has cut it")
                try:
                    start += call(self._file.fileno(), [view[start:end]], offset + start)
                except OSError as cause:
                    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise self._shortage(end - start, cause) from cause
                    raise self._trouble(what, offset, end, cause.strerror) from cause

        starts = range(0, len(view), _PIECE_BYTES)
        return [self._pool.submit(part, start, min(start + _PIECE_BYTES, len(view))) for start in starts]

    def _trouble(self, what: str, offset: int, end: int, reason: str | None) -> OffloadError:
        return OffloadError(
            f"Up to {end} bytes at offset {offset} of the offloaded chunks in {self._folder.asked} could not be "
            f"{what}: {reason}. Start again from the last checkpoint, on a disk that works."
        )

    def _shortage(self, num_bytes: int, cause: OSError) -> OffloadError:
        return OffloadError(
            f"Offloading to {self._folder.asked} needs {num_bytes} more bytes, and {self._folder.told_free_bytes()} "
            f"({cause.strerror}). Nothing is lost: what should have moved there is still in memory, and can be saved. "
            "Make room, or name another folder."
        )

    def close(self) -> None:
        """End the threads, and give the file's room back."""
        self._pool.shutdown(wait=True)
        self._close()


class DiskPlace:
    """A region of the disk; see `HostPlace`. The bytes of a device's block pass through a buffer of the host.

    Args:
        num_bytes: Size of the block.
        store: The disk.
        ring: Lends the host's buffers.
        copies: Copies between these and the device; ``None`` where the host computes with the block.

    Raises:
        OffloadError: If the disk is full.
    """

    name = "disk"

    def __init__(self, num_bytes: int, store: DiskStore, ring: Ring, copies: Copies | None) -> None:
        self._num_bytes, self._store, self._ring, self._copies = num_bytes, store, ring, copies
        self._offset = store.allocate(num_bytes)
        self.keeps_buffer = copies is None
        self._parts: list[Future[None]] = []
        self._staged: Tensor | None = None
        self._target: Tensor | None = None

    def send(self, buffer: Tensor, ready: torch.Event | None) -> None:
        if self._copies is not None:
            self._staged = self._ring.take(self._num_bytes) if self._staged is None else self._staged
            ready = self._copies.send(self._staged[: self._num_bytes], buffer, ready)
            buffer = self._staged
        self._parts = self._store.move("written", self._offset, buffer, None if ready is None else ready.synchronize)

    def bring(self, buffer: Tensor) -> None:
        if self._copies is not None:
            self._target = buffer
            if self._staged is not None:  # which could not be written, and has the values
                self._parts = []
                return
            buffer = self._staged = self._ring.take(self._num_bytes)
        self._parts = self._store.move("read", self._offset, buffer)

    @property
    def is_done(self) -> bool:
        return all(part.done() for part in self._parts)

    def settle(self) -> torch.Event | None:
        wait(self._parts)
        for part in self._parts:
            part.result()  # which raises each time: what could not be read is never taken for the values
        self._parts = []
        return self._give_back()

    def _give_back(self) -> torch.Event | None:
        staged, target, self._staged, self._target = self._staged, self._target, None, None
        if staged is None or self._copies is None:
            return None
        copied = None if target is None else self._copies.bring(target, staged[: self._num_bytes])
        self._ring.give(staged, self._num_bytes, copied)
        return copied

    def abandon(self) -> None:
        wait(part for part in self._parts if not part.cancel())
        self._parts, self._target = [], None
        if self._staged is not None and self._copies is not None:
            self._copies.synchronize()  # it may still be on its way into the buffer
        self._give_back()

    def drop(self) -> None:
        self.abandon()
        self._store.free(self._offset, self._num_bytes)
