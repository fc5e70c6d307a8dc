"""A range of a file, local or at a URL, as one of Python's own streams."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable


class _Readable(Protocol):
    def read_into(self, target: memoryview, offset: int) -> None: ...


class RangeStream(io.RawIOBase):
    """Reads a range of a file.

    Args:
        file: The file.
        start: Where the range begins in it, in bytes.
        length: Its size in bytes.
        on_close: Called when the stream is closed.
    """

    def __init__(self, file: _Readable, start: int, length: int, on_close: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._file, self._start, self._length, self._on_close = file, start, length, on_close
        self._position = 0

    @override
    def close(self) -> None:
        if not self.closed and self._on_close is not None:
            self._on_close()
        super().close()

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
