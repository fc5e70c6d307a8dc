"""Files that are open for reads of ranges, wherever they are; local ones, and what their failures mean.

A local file is read by plain reads: where a disk fails, or somebody truncates the file, a read is an error, and a
mapping would end the process by SIGBUS. However many files a checkpoint has, few of them are open at a time.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from abc import ABC, abstractmethod
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol, cast

from typing_extensions import override

from booster_core.errors import (
    CheckpointAbsentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointUnreadableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_checkpoint.storage.location import LocalLocation, Location

_STREAM_BYTES = 1 << 16

_MAX_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB - 4 KiB per call."""
_MOST_OPEN = 32
"""How many files are kept open."""
_REMEDIES = {
    errno.EACCES: "Check its owner and mode.",
    errno.EPERM: "Check its owner and mode.",
    errno.EIO: "The disk, or the connection to it, is at fault: look at the system's log.",
    errno.ESTALE: "Its server has replaced it meanwhile: load it again.",
}


class OpenFile(ABC):
    """A file that is open for reads of ranges from several threads; made by `Location.open`.

    Args:
        place: Where it is.
        size: Its size in bytes.
    """

    window_bytes: ClassVar[int]
    """How much is read at a time of a range that need not be read at once."""
    gap_bytes: ClassVar[int]
    """Bytes that are read and thrown away rather than left out by one more read."""

    def __init__(self, place: Location, size: int) -> None:
        self.place = place
        self.size = size

    @abstractmethod
    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` from a byte offset on.

        Raises:
            CheckpointDamagedError: If the file ends before that, or another one has taken its place.
            CheckpointAbsentError: If it is gone.
            CheckpointUnreadableError, StorageUnreachableError: If it can't be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the file, until it is read again."""

    def contents(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield a range from front to back, in memory that is used again; less where the file ends before."""
        end = min(end, self.size)
        memory = memoryview(bytearray(max(min(self.window_bytes, end - begin), 0)))
        for start in range(begin, end, self.window_bytes):
            part = memory[: min(self.window_bytes, end - start)]
            self.read_into(part, start)
            yield part

    def stream(self) -> IO[bytes]:
        """Return all of the file as a stream."""
        return cast("IO[bytes]", io.BufferedReader(RangeStream(self, 0, self.size), _STREAM_BYTES))


class _Readable(Protocol):
    def read_into(self, target: memoryview, offset: int) -> None: ...


class RangeStream(io.RawIOBase):
    """Reads a range of a file.

    Args:
        file: The file.
        start: Where the range begins in it, in bytes.
        length: Its size in bytes.
    """

    def __init__(self, file: _Readable, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length = file, start, length
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    @override
    def tell(self) -> int:
        return self._position

    @override
    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        target = target[: max(self._length - self._position, 0)]
        if target:
            self._file.read_into(target, self._start + self._position)
        self._position += len(target)
        return len(target)


class LocalFile(OpenFile):
    """A file of the file system. Its descriptor is closed while many others are in use, and opened by the next read.

    Args:
        place: Where it is.

    Raises:
        CheckpointAbsentError: If there is none.
        CheckpointUnreadableError: If it cannot be opened.
    """

    window_bytes = 1 << 20  # stays in a processor's cache until it is copied or hashed
    gap_bytes = 1 << 15

    def __init__(self, place: LocalLocation) -> None:
        self.path = place.path
        self._identity: tuple[int, ...] | None = None
        try:
            _descriptor_of(self)
        except OSError as error:
            raise read_error(error, self.path) from error
        assert self._identity is not None, "known since it was opened"
        super().__init__(place, self._identity[2])

    @override
    def read_into(self, target: memoryview, offset: int) -> None:
        try:
            descriptor = _descriptor_of(self)
            while target:
                count = os.preadv(descriptor.number, [target[:_MAX_CALL_BYTES]], offset)
                if count == 0:
                    msg = f"'{self.path}' ended at byte {offset} while it was being read. Did something truncate it?"
                    raise CheckpointDamagedError(msg)
                target = target[count:]
                offset += count
        except OSError as error:
            raise read_error(error, self.path, offset) from error

    @override
    def close(self) -> None:
        with _lock:
            _open.pop(self, None)

    def open(self) -> _Descriptor:
        """Return a new descriptor of the file that was there at first."""
        descriptor = _Descriptor(os.open(self.path, os.O_RDONLY))
        status = os.fstat(descriptor.number)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._identity not in (None, identity):
            msg = f"'{self.path}' was replaced or changed while it was being read. Load it again."
            raise CheckpointDamagedError(msg)
        self._identity = identity
        if hasattr(os, "posix_fadvise"):
            # Tensors are read from front to back: the kernel reads twice as far ahead of a cold file.
            os.posix_fadvise(descriptor.number, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return descriptor


class _Descriptor:
    """An open file, which is closed when nobody has it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


_open: dict[LocalFile, _Descriptor] = {}
"""Those that are kept open, in the order of their use."""
_lock = threading.Lock()


def _descriptor_of(file: LocalFile) -> _Descriptor:
    """Return a file's descriptor; of many, the one that was used longest ago is let go."""
    with _lock:
        _open[file] = found = _open.pop(file, None) or file.open()
        while len(_open) > _MOST_OPEN:
            del _open[next(iter(_open))]
        return found


def read_error(error: OSError, path: object, offset: int | None = None) -> CheckpointError:
    """Return what it means for a checkpoint that the operating system refused a read.

    Args:
        error: What it said.
        path: What was to be read, where the error does not name it.
        offset: Where in the file the read began, in bytes.

    Returns:
        A `CheckpointAbsentError` where nothing is there, else a `CheckpointUnreadableError`; it names the path.
    """
    where = error.filename or path
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        failure: CheckpointError = CheckpointAbsentError(f"There is no '{where}'.")
    else:
        at = "" if offset is None else f" at byte {offset}"
        remedy = _REMEDIES.get(error.errno or 0, "")
        reason = error.strerror or str(error)
        failure = CheckpointUnreadableError(f"'{where}' cannot be read{at}: {reason}. {remedy}".rstrip())
    failure.__cause__ = error
    return failure
