"""A file at a URL that is open for reads of ranges, and what is read ahead of its use.

A request takes as long as the transfer of a few MiB, so ranges with small gaps between them are read as one, and
several requests are on their way at a time.
"""

from __future__ import annotations

import bisect
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from booster_checkpoint.storage.failures import storage_errors
from booster_checkpoint.storage.open_file import OpenFile
from booster_core.errors import CheckpointDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from booster_checkpoint.storage.location import StoredLocation

REQUEST_BYTES = 8 << 20
"""Larger ranges are read by several requests at a time."""
REQUESTS_IN_FLIGHT = 8
HEAD_BYTES = 1 << 16
"""What is read of a file first, and kept: most headers are smaller."""


class Requests:
    """Threads for requests, shared by the files of a checkpoint, and made when they are first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The threads."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, "checkpoint reader")
            return self._pool

    def close(self) -> None:
        """End the threads, until they are needed again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


class StoredFile(OpenFile):
    """A file at a URL.

    Args:
        place: Where it is.
        size: Its size in bytes.
        requests: Threads, which may serve other files as well.

    Attributes:
        ahead: Reads ahead of this file, where somebody knows what will be asked for.
    """

    window_bytes = REQUEST_BYTES
    gap_bytes = 1 << 20

    def __init__(self, place: StoredLocation, size: int, requests: Requests) -> None:
        super().__init__(place, size)
        self.ahead: ReadAhead | None = None
        self.requests = requests
        self._storage, self._url = place.storage, place.url
        self._head: bytes | None = None

    def head(self) -> bytes:
        """Return the beginning of the file, which is read once."""
        if self._head is None:
            content = bytearray(min(self.size, HEAD_BYTES))
            self.request(memoryview(content), 0)
            self._head = bytes(content)
        return self._head

    @override
    def read_into(self, target: memoryview, offset: int) -> None:
        if offset + len(target) > self.size:
            msg = f"'{self.place}' ended at byte {self.size} while it was being read. Did something truncate it?"
            raise CheckpointDamagedError(msg)
        if offset + len(target) <= HEAD_BYTES:
            target[:] = self.head()[offset : offset + len(target)]
        elif self.ahead is None or not self.ahead.take(self, target, offset):
            cut = range(0, len(target), REQUEST_BYTES)
            if len(cut) == 1:
                self.request(target, offset)
            else:
                parts = [(target[start : start + REQUEST_BYTES], offset + start) for start in cut]
                list(self.requests.pool.map(lambda part: self.request(*part), parts))

    def request(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` by one request."""
        with storage_errors(self._url, "read"):
            self._storage.read(self._url, offset, target)

    @override
    def contents(self, begin: int, end: int) -> Iterator[memoryview]:
        ReadAhead([(self, begin, min(end, self.size))], REQUESTS_IN_FLIGHT * REQUEST_BYTES)
        yield from super().contents(begin, end)

    @override
    def close(self) -> None:
        self.requests.close()


@dataclass(eq=False)
class _Request:
    """A range of a file that is read at once, and dropped when all of it that is wanted has been taken."""

    file: StoredFile
    start: int
    stop: int
    wanted: int
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

    def __init__(self, uses: Iterable[tuple[StoredFile, int, int]], most_bytes: int) -> None:
        piece = max(min(REQUEST_BYTES, most_bytes // REQUESTS_IN_FLIGHT), 1 << 16)
        self._requests: list[_Request] = []
        for file, start, stop in uses:
            if stop > HEAD_BYTES:  # what is before is kept from when the file was opened
                self._add(file, start, stop, piece)
        self._by_file: dict[int, list[_Request]] = {}
        for request in sorted(self._requests, key=lambda request: request.start):
            self._by_file.setdefault(id(request.file), []).append(request)
            request.file.ahead = self
        self._most_bytes = most_bytes
        self._held = 0
        self._next = 0
        self._lock = threading.Lock()

    def _add(self, file: StoredFile, start: int, stop: int, piece: int) -> None:
        """Put a range into the last request as far as there is room, and into new ones."""
        last = self._requests[-1] if self._requests else None
        if last is not None and last.file is file and last.start <= start <= last.stop + min(file.gap_bytes, piece):
            end = min(stop, max(last.start + piece, last.stop))
            if end > start:
                last.stop = max(last.stop, end)
                last.wanted += end - start
                start = end
        while start < stop:
            end = min(start + piece, stop)
            self._requests.append(_Request(file, start, end, end - start))
            start = end

    def take(self, file: StoredFile, target: memoryview, offset: int) -> bool:
        """Fill ``target`` where all of it is being read ahead; return whether that is so."""
        found = list(self._covering(file, offset, offset + len(target)))
        if sum(stop - start for _, start, stop in found) != len(target):
            return False
        for request, start, stop in found:
            content = self._content_of(request)
            target[start - offset : stop - offset] = content.result()[start - request.start : stop - request.start]
            self._take_from(request, stop - start)
        return True

    def _covering(self, file: StoredFile, start: int, stop: int) -> Iterator[tuple[_Request, int, int]]:
        requests = self._by_file.get(id(file), [])
        first_at = bisect.bisect_right(requests, start, key=lambda request: request.start) - 1
        for index in range(max(first_at, 0), len(requests)):
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
                request.content = request.file.requests.pool.submit(request.run)
            return request.content

    def _take_from(self, request: _Request, nbytes: int) -> None:
        with self._lock:
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
                    return
                self._held += nbytes
                request.content = request.file.requests.pool.submit(request.run)
            self._next += 1
