"""A file that is open for reads of ranges, wherever it is, and ranges of it as Python's own streams."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol, cast

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_checkpoint.storage.location import Location

_STREAM_BYTES = 1 << 16


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
