"""Reading files at URLs: which ranges of bytes are worth a request each, and reading them ahead of their use.

A request takes as long as the transfer of a few MiB, so ranges with small gaps between them are read as one, and
several requests are on their way at a time.
"""

from __future__ import annotations

import bisect
import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from booster_checkpoint.storage.remote_path import HEAD_BYTES, REQUEST_BYTES, REQUESTS_IN_FLIGHT
from booster_core.state import is_contiguous, span_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from booster_checkpoint.storage.remote_path import RemoteFile
    from booster_core.state import Box

GAP_BYTES = 1 << 20
"""Bytes that are read and thrown away rather than left out by one request more."""


def pieces_of(shape: tuple[int, ...], box: Box, itemsize: int, window_bytes: int, gap_bytes: int) -> Iterator[Box]:
    """Cut a box of a row-major tensor in a file into boxes, the span of each of which is worth reading whole.

    They follow each other in the box' own row-major order. Each is either one range of the file, or has rows with small
    gaps between them and a span of at most a window, or of one row.

    Args:
        shape: Shape of the whole tensor.
        box: The part to read; not empty.
        itemsize: Bytes per element.
        window_bytes: Most bytes to read at a time, where there are gaps in between.
        gap_bytes: The largest gap that is read, too.
    """
    if is_contiguous(shape, box):
        yield box
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    first, last = span_of(shape[1:], box[1:])
    start, stop = box[0]
    is_row_solid = is_contiguous(shape[1:], box[1:]) or row_bytes <= window_bytes
    if is_row_solid and row_bytes - (last - first) * itemsize <= gap_bytes:
        step = max(window_bytes // row_bytes, 1)
        for begin in range(start, stop, step):
            yield ((begin, min(begin + step, stop)), *box[1:])
        return
    for index in range(start, stop):
        for inner in pieces_of(shape[1:], box[1:], itemsize, window_bytes, gap_bytes):
            yield ((index, index + 1), *inner)


def byte_ranges(offset: int, shape: tuple[int, ...], itemsize: int, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file at a URL that are read for a box of the tensor whose values begin at an offset."""
    for piece in pieces_of(shape, box, itemsize, REQUEST_BYTES, GAP_BYTES):
        first, last = span_of(shape, piece)
        yield offset + first * itemsize, offset + last * itemsize


@dataclass(eq=False)
class _Request:
    """A range of a file that is read at once, and dropped when all of it that is wanted has been taken."""

    file: RemoteFile
    start: int
    stop: int
    wanted: int
    number: int = 0
    content: Future[memoryview] | None = field(default=None)

    def run(self) -> memoryview:
        memory = memoryview(bytearray(self.stop - self.start))
        self.file.request(memory, self.start)
        return memory


class ReadAhead:
    """Reads what files will be asked for, in the order in which that will be, a few requests ahead.

    Args:
        uses: Files and ranges, in that order. Anything else may be asked for as well, and is read when it is.
        most_bytes: Memory for what has been read and not been taken.
    """

    def __init__(self, uses: Iterable[tuple[RemoteFile, int, int]], most_bytes: int) -> None:
        piece = max(min(REQUEST_BYTES, most_bytes // REQUESTS_IN_FLIGHT), 1 << 16)
        self._requests: list[_Request] = []
        for file, start, stop in uses:
            if stop > HEAD_BYTES:  # what is before is kept from when the file was opened
                self._add(file, start, stop, piece)
        self._starts: dict[int, list[int]] = {}
        self._by_file: dict[int, list[_Request]] = {}
        for request in sorted(self._requests, key=lambda request: request.start):
            self._by_file.setdefault(id(request.file), []).append(request)
            self._starts.setdefault(id(request.file), []).append(request.start)
            request.file.ahead = self
        for number, request in enumerate(self._requests):
            request.number = number
        self._most_bytes = most_bytes
        self._held = 0
        self._next = 0
        self._position = 0
        self._lock = threading.Lock()

    def _add(self, file: RemoteFile, start: int, stop: int, piece: int) -> None:
        """Put a range into the last request as far as there is room, and into new ones."""
        last = self._requests[-1] if self._requests else None
        if last is not None and last.file is file and last.start <= start <= last.stop + min(GAP_BYTES, piece):
            end = min(stop, max(last.start + piece, last.stop))
            if end > start:
                last.stop = max(last.stop, end)
                last.wanted += end - start
                start = end
        while start < stop:
            end = min(start + piece, stop)
            self._requests.append(_Request(file, start, end, end - start))
            start = end

    def take(self, file: RemoteFile, target: memoryview, offset: int) -> bool:
        """Fill ``target`` where all of it is being read ahead; return whether that is so."""
        found = list(self._covering(file, offset, offset + len(target)))
        if sum(stop - start for _, start, stop in found) != len(target):
            return False
        for request, start, stop in found:
            content = self._content_of(request)
            target[start - offset : stop - offset] = content.result()[start - request.start : stop - request.start]
            self._take_from(request, stop - start)
        return True

    def _covering(self, file: RemoteFile, start: int, stop: int) -> Iterator[tuple[_Request, int, int]]:
        starts = self._starts.get(id(file), [])
        requests = self._by_file.get(id(file), [])
        for index in range(max(bisect.bisect_right(starts, start) - 1, 0), len(requests)):
            request = requests[index]
            if request.start >= stop:
                return
            first, last = max(start, request.start), min(stop, request.stop)
            if first < last:
                yield request, first, last
                start = last

    def _content_of(self, request: _Request) -> Future[memoryview]:
        with self._lock:
            self._start_some()
            if request.content is None:  # out of turn, or once more
                self._held += request.stop - request.start
                request.content = request.file.pool.submit(request.run)
            return request.content

    def _take_from(self, request: _Request, nbytes: int) -> None:
        with self._lock:
            self._position = max(self._position, request.number)
            request.wanted -= nbytes
            if request.wanted <= 0 and request.content is not None:
                request.content = None
                self._held -= request.stop - request.start
            self._start_some()

    def _start_some(self) -> None:
        while self._next < len(self._requests):
            request = self._requests[self._next]
            if request.content is None and request.wanted > 0:
                nbytes = request.stop - request.start
                if self._held and self._held + nbytes > self._most_bytes:
                    self._drop_passed()
                    if self._held and self._held + nbytes > self._most_bytes:
                        return
                self._held += nbytes
                request.content = request.file.pool.submit(request.run)
            self._next += 1

    def _drop_passed(self) -> None:
        """Drop requests of which something was not asked for, when what comes after them was."""
        for request in self._requests[: max(self._position - 1, 0)]:
            if request.content is not None and request.content.done():
                request.content, request.wanted = None, 0
                self._held -= request.stop - request.start


def contents_of(file: RemoteFile, begin: int, end: int) -> Iterator[memoryview]:
    """Yield a range of a file from front to back, in memory that is used again, while more of it is on its way."""
    end = min(end, file.size)
    ReadAhead([(file, begin, end)], REQUESTS_IN_FLIGHT * REQUEST_BYTES)
    memory = memoryview(bytearray(max(min(REQUEST_BYTES, end - begin), 0)))
    try:
        for start in range(begin, end, REQUEST_BYTES):
            part = memory[: min(REQUEST_BYTES, end - start)]
            file.read_into(part, start)
            yield part
    finally:
        file.close()
