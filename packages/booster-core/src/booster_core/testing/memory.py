"""Peaks and limits of this process' memory, for tests that state how much a piece of work may take (Linux only).

A peak is the kernel's own high-water mark, so that it includes what torch's kernels and gloo take. Only anonymous
pages count: pages of mapped files are the page cache's, and go when somebody else needs the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SELF = Path("/proc/self")
_RESET_PEAK = "5"


@dataclass
class MemoryPeak:
    """What a block of code took; filled in when the block ends.

    Args:
        start_bytes: Anonymous memory at the start.
        peak_bytes: Largest anonymous memory during the block, above that at the start.
        kept_bytes: Anonymous memory at the end, above that at the start; may be negative.
    """

    start_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0


@contextlib.contextmanager
def peak_memory() -> Iterator[MemoryPeak]:
    """Measure the peak of this process' anonymous memory over the block, above what was there before.

    The kernel keeps a high-water mark of all resident pages only. File-backed pages are taken off as they stood at the
    start, or at the end where fewer are left, so that a block which maps files is charged for pages it made its own.

    Collective: none.
    """
    _settle()
    (_SELF / "clear_refs").write_text(_RESET_PEAK)
    before = _status()
    peak = MemoryPeak(start_bytes=before["RssAnon"])
    try:
        yield peak
    finally:
        after = _status()
        file_backed = max(
            before["RssFile"] + before["RssShmem"],
            after["RssFile"] + after["RssShmem"],
        )
        # The mark may lie below the present anonymous pages plus these, because file-backed pages came later.
        peak.peak_bytes = max(after["VmHWM"] - file_backed, after["RssAnon"], before["RssAnon"]) - before["RssAnon"]
        peak.kept_bytes = after["RssAnon"] - before["RssAnon"]


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
