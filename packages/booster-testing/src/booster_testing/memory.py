"""Measure this process's memory, for tests with a memory bound (Linux only).

A peak is the kernel's high-water mark, which includes memory of torch's kernels and of gloo. Only anonymous
pages count: pages of mapped files belong to the page cache, which the kernel reclaims if needed.
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
    """Memory use of a block of code; filled in when the block ends.

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
    """Measure the peak of this process's anonymous memory during the block, relative to its start.

    The kernel keeps a high-water mark of all resident pages only. The number of file-backed pages at the start, or at
    the end if larger, is subtracted; pages of files that are mapped and unmapped within the block would be counted.

    Args:
        maps_files: Set if the block maps large files: anonymous memory is then sampled every millisecond, which may
            miss shorter peaks.
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
        # The peak may be below the current use, because file-backed pages were added after it.
        peak.peak_bytes = max(highest, after["RssAnon"], before["RssAnon"]) - before["RssAnon"]
        _settle()  # free memory that malloc keeps does not count
        peak.kept_bytes = _status()["RssAnon"] - before["RssAnon"]


class _Sampler:
    """A thread that samples anonymous memory and stores the largest value."""

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


def _status() -> dict[str, int]:
    """Return the sizes in ``/proc/self/status``, in bytes."""
    sizes = {}
    for line in (_SELF / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value[:-3]) * 1024
    return sizes


def _settle() -> None:
    """Collect garbage and return free memory to the system, so that it is not measured."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
