"""Reading files of tensors in parts: the interface of a file, and how ranges of it get into a tensor's memory.

A box that is contiguous in the file takes one ``pread`` straight into the tensor's memory. Any other box (columns of a
matrix) is one strided copy from a shared mapping, which costs page-cache memory but none of the process' own. However
many files a checkpoint has, few of them are open at a time. A file at a URL is read by ranges
(`booster_checkpoint.files.ranges`).
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from booster_checkpoint.files.ranges import read_box
from booster_checkpoint.storage import RemotePath
from booster_core.errors import CheckpointError
from booster_core.state import as_bytes, box_shape, full_box, is_contiguous, slices_of, span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_core.state import Box, TensorMeta

_MAX_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB - 4 KiB per call."""
_WINDOW_BYTES = 4 << 20
"""How much of a file is mapped at a time, unless one row is larger."""
_MOST_OPEN = 32
"""How many files are kept open."""


class TensorFile(ABC):
    """An open file of tensors. Its directory has been read and checked; no values have."""

    path: Path
    tensors: Mapping[str, TensorMeta]
    """What the file says of its tensors."""
    values: Mapping[str, Any]
    """What else it holds: encoded JSON by name."""

    @abstractmethod
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor.

        Safe to call from several threads.

        Args:
            key: The tensor.
            box: Index range of the whole tensor; not empty.
            out: Where to put it, row-major: contiguous on the CPU, 1-D, with the file's dtype.
        """

    def place_of(self, key: str) -> tuple[ByteFile, int] | None:
        """Return the file, and where in it a tensor's values begin, if `read` reads them by `ByteFile.read_box`."""
        del key
        return None

    def take_turns(self, turn: int, num_turns: int) -> None:  # noqa: B027 - formats without checksums do nothing
        """Verify what others that read the same of this file do not."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""


class ByteFile:
    """The bytes of a file, read in ranges by any thread.

    A local file's descriptor is closed while many other files are in use, and opened again by the next read.

    Args:
        path: The file.
        checks: Verifies what is read.

    Attributes:
        remote: The open file, if it is at a URL.
        size: Its size in bytes.

    Raises:
        CheckpointError: If it cannot be opened; and later, if another file has taken its place.
    """

    def __init__(self, path: Path, checks: CheckedReads | None = None) -> None:
        self.path = path
        self._checks = checks
        self._identity: tuple[int, ...] | None = None
        self.remote = path.open_ranges() if isinstance(path, RemotePath) else None
        if self.remote is not None:
            self.size = self.remote.size
            return
        with self.opened() as descriptor:
            self.size = os.fstat(descriptor).st_size

    def take_turns(self, turn: int, num_turns: int) -> None:
        """Verify some of the blocks only; see `CheckedReads.take_turns`."""
        if self._checks is not None:
            self._checks.take_turns(turn, num_turns)

    def extent(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range that is read where a range is asked for: up to the end of the block it ends in."""
        return (start, stop) if self._checks is None else (start, self._checks.end_of_block(stop))

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory from a byte offset.

        Raises:
            CheckpointError: If the file ends before that, or the bytes are not what was saved.
        """
        if self._checks is None:
            self._read(target, offset)
        else:
            self._checks.read(self._read, target, offset)

    def read_box(self, offset: int, shape: tuple[int, ...], itemsize: int, box: Box, out: torch.Tensor) -> None:
        """Read a box of a row-major tensor.

        Args:
            offset: Where the tensor's values begin, in bytes.
            shape: Shape of the whole tensor.
            itemsize: Bytes per element.
            box: The part to read; not empty.
            out: Contiguous CPU tensor of ``box_numel(box)`` elements.

        Raises:
            CheckpointError: As `read_into` does.
        """
        if is_contiguous(shape, box):
            self.read_into(as_bytes(out), offset + span_of(shape, box)[0] * itemsize)
            return
        if self.remote is not None:
            target = as_array(as_bytes(out), 0, box_shape(box), itemsize)
            read_box(self.read_into, offset, shape, itemsize, box, target)
            return
        if self._checks is not None:
            self._checks.verify_box(self._read, offset, shape, itemsize, box)
        with self.opened() as descriptor:
            read_strided(descriptor, offset, shape, itemsize, box, out)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Give a descriptor, which stays open until the body ends."""
        descriptor = _OPEN.take(self)
        try:
            yield descriptor
        finally:
            _OPEN.give_back(self)

    def close(self) -> None:
        """Let go of the file."""
        if self.remote is not None:
            self.remote.close()
        _OPEN.close(self)

    def open(self) -> int:
        """Return a new descriptor of the file that was there at first."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            msg = f"'{self.path}' cannot be read: {error.strerror or error}."
            raise CheckpointError(msg) from error
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._identity not in (None, identity):
            os.close(descriptor)
            msg = f"'{self.path}' was replaced or changed while it was being read. Load it again."
            raise CheckpointError(msg)
        self._identity = identity
        if hasattr(os, "posix_fadvise"):
            # Tensors are read from front to back: the kernel reads twice as far ahead of a cold file.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return descriptor

    def _read(self, target: memoryview, offset: int) -> None:
        if self.remote is not None:
            self.remote.read_into(target, offset)
            return
        with self.opened() as descriptor:
            pread_into(descriptor, target, offset, self.path)


class _OpenFiles:
    """The descriptors of files that are being read; the one that was used longest ago is closed first.

    Args:
        most: How many stay open, unless more are read at the same moment.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._descriptors: dict[ByteFile, int] = {}  # in the order of use
        self._uses: dict[ByteFile, int] = {}

    def take(self, file: ByteFile) -> int:
        with self._lock:
            descriptor = self._descriptors.pop(file, None)
            if descriptor is None:
                descriptor = file.open()
            self._descriptors[file] = descriptor
            self._uses[file] = self._uses.get(file, 0) + 1
            while len(self._descriptors) > self._most:
                idle = next((each for each in self._descriptors if each not in self._uses), None)
                if idle is None:
                    break
                os.close(self._descriptors.pop(idle))
            return descriptor

    def give_back(self, file: ByteFile) -> None:
        with self._lock:
            self._uses[file] -= 1
            if not self._uses[file]:
                del self._uses[file]

    def close(self, file: ByteFile) -> None:
        with self._lock:
            descriptor = self._descriptors.pop(file, None)
            if descriptor is not None:
                os.close(descriptor)


_OPEN = _OpenFiles(_MOST_OPEN)


def pread_into(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    """Fill ``target`` from a byte offset of a file.

    Raises:
        CheckpointError: If the file ends before that.
    """
    while target:
        count = os.preadv(descriptor, [target[:_MAX_CALL_BYTES]], offset)
        if count == 0:
            msg = f"'{path}' ended at byte {offset} while it was being read. Did something truncate it?"
            raise CheckpointError(msg)
        target = target[count:]
        offset += count


def read_strided(
    source: int | memoryview, offset: int, shape: tuple[int, ...], itemsize: int, box: Box, out: torch.Tensor
) -> None:
    """Copy a box of a row-major tensor in a file, or in memory, to ``out``.

    Args:
        source: File descriptor, or the bytes themselves.
        offset: Where the tensor's values begin, in bytes.
        shape: Shape of the whole tensor.
        itemsize: Bytes per element.
        box: The part to copy; not empty.
        out: Contiguous CPU tensor of ``box_numel(box)`` elements.
    """
    target = as_array(as_bytes(out), 0, box_shape(box), itemsize)
    if isinstance(source, memoryview):
        np.copyto(target, as_array(source, offset, shape, itemsize)[slices_of(box)])
        return
    (first, last), row_bytes = box[0], itemsize * math.prod(shape[1:])
    step = max(_WINDOW_BYTES // row_bytes, 1)
    for start in range(first, last, step):
        stop = min(start + step, last)
        begin, end = offset + start * row_bytes, offset + stop * row_bytes
        base = begin - begin % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(source, end - base, mmap.MAP_SHARED, mmap.PROT_READ, offset=base) as mapping:
            # Not in a variable: a mapping with views cannot be closed.
            np.copyto(
                target[start - first : stop - first],
                as_array(memoryview(mapping), begin - base, (stop - start, *shape[1:]), itemsize)[
                    (slice(None), *slices_of(box[1:]))
                ],
            )


def as_array(memory: memoryview, offset: int, shape: tuple[int, ...], itemsize: int) -> np.ndarray[Any, Any]:
    """Return memory as an array of opaque elements; unaligned memory is fine."""
    return np.ndarray(shape, dtype=f"V{itemsize}", buffer=memory, offset=offset)


def read_whole(meta: TensorMeta, read: Callable[[Box, torch.Tensor], None]) -> torch.Tensor:
    """Return all of a tensor.

    Args:
        meta: Its shape and dtype.
        read: Fills a contiguous tensor with the values of a box.
    """
    import torch

    tensor = torch.empty(meta.shape, dtype=meta.dtype)
    if tensor.numel():
        read(full_box(meta.shape), tensor.view(-1))
    return tensor
