"""Peaks and limits of this process' memory, for tests that state how much a piece of work may take (Linux only).

A peak is the kernel's own high-water mark, so that it includes what torch's kernels and gloo take. Only anonymous
pages count: pages of mapped files are the page cache's, and go when somebody else needs the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SELF = Path("/proc/self")
_RESET_PEAK = "5"
_SAMPLE_SECONDS = 0.001


@dataclass
class MemoryPeak:
    """What a block of code took; filled in when the block ends.

    Args:
        start_bytes: Anonymous memory at the start.
        peak_bytes: Largest anonymous memory during the block, above that at the start.
        kept_bytes: Anonymous memory in use after the block, above that at the start; may be negative.
    """

    start_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0


@contextlib.contextmanager
def peak_memory(*, maps_files: bool = False) -> Iterator[MemoryPeak]:
    """Measure the peak of this process' anonymous memory over the block, above what was there before.

    The kernel keeps a high-water mark of all resident pages only. File-backed pages are taken off as they stood at the
    start, or at the end where more are there then; pages of files that are mapped and unmapped within the block would
    be charged to it.

    Args:
        maps_files: The block maps large files: sample anonymous memory every millisecond instead, which may miss
            shorter peaks.

    Collective: none.
    """
    _settle()
    (_SELF / "clear_refs").write_text(_RESET_PEAK)
    before = _status()
    peak = MemoryPeak(start_bytes=before["RssAnon"])
    sampler = _Sampler() if maps_files else None
    try:
        yield peak
    finally:
        after = _status()
        if sampler is None:
            num_file_backed = max(status["RssFile"] + status["RssShmem"] for status in (before, after))
            highest = after["VmHWM"] - num_file_backed
        else:
            highest = sampler.stop()
        # The mark may lie below the present pages, because file-backed ones came after the peak.
        peak.peak_bytes = max(highest, after["RssAnon"], before["RssAnon"]) - before["RssAnon"]
        _settle()  # what malloc keeps for later is nobody's
        peak.kept_bytes = _status()["RssAnon"] - before["RssAnon"]


class _Sampler:
    """A thread that remembers the largest anonymous memory that it has seen."""

    def __init__(self) -> None:
        self._highest_pages = 0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory sampler", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the thread and return the largest value, in bytes."""
        self._is_stopped.set()
        self._thread.join()
        return self._highest_pages * resource.getpagesize()

    def _sample(self) -> None:
        with (_SELF / "statm").open() as file:
            while not self._is_stopped.wait(_SAMPLE_SECONDS):
                file.seek(0)
                _, resident, file_backed, *_ = map(int, file.read().split())
                self._highest_pages = max(self._highest_pages, resident - file_backed)


@contextlib.contextmanager
def data_limit(num_bytes: int) -> Iterator[None]:
    """Let this process' data grow by at most ``num_bytes`` during the block; beyond, allocations raise.

    torch's CPU allocator then raises ``RuntimeError``, Python's ``MemoryError``; nothing is killed.

    Args:
        num_bytes: Bytes above the present ``VmData``.

    Collective: none.
    """
    _settle()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status()["VmData"] + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _status() -> dict[str, int]:
    """Return the sizes in ``/proc/self/status``, in bytes."""
    sizes = {}
    for line in (_SELF / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value[:-3]) * 1024
    return sizes


def _settle() -> None:
    """Give back what is garbage already, so that it is not measured as somebody's use."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
