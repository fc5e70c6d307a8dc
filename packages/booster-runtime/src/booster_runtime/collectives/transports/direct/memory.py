"""Reads of another process' memory, where the system allows them."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Any

_ALLOW_READERS = 0x59616D61
"""``PR_SET_PTRACER``: which processes the Yama security module lets read this one's memory."""


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _library() -> Any:
    # A board's words are written without barriers; only x86-64 shows them to other cores in the order of writing.
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "process_vm_readv"):
        return None
    ranges = ctypes.POINTER(_Range)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = (
        ctypes.c_int,
        ranges,
        ctypes.c_ulong,
        ranges,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return library


_LIBC = _library()


def is_supported() -> bool:
    """Return whether this is x86-64 Linux and has the call; whether the call is permitted is found by trying."""
    return _LIBC is not None


def allow_readers() -> None:
    """Let processes of the same user read this one's memory, which Yama's level 1 forbids by default."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if _LIBC is not None and scope.exists() and scope.read_text(encoding="ascii").strip() == "1":
        _LIBC.prctl(_ALLOW_READERS, ctypes.c_ulong(-1), 0, 0, 0)


def read(pid: int, source: int, target: int, nbytes: int) -> None:
    """Copy bytes from another process.

    Args:
        pid: The process.
        source: Address there.
        target: Address here.
        nbytes: How many.

    Raises:
        OSError: If the process has ended, forbids it, or has no such memory.
    """
    done = 0
    while done < nbytes:
        here = _Range(target + done, nbytes - done)
        there = _Range(source + done, nbytes - done)
        count = _LIBC.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"{os.strerror(error)} (reading {nbytes} bytes of process {pid})")
        done += count


class Window:
    """Reads a fixed number of bytes of another process into one place, with less overhead than `read`.

    Args:
        pid: The process.
        target: Address here.
        nbytes: How many.
    """

    def __init__(self, pid: int, target: int, nbytes: int) -> None:
        self._pid, self._nbytes = pid, nbytes
        self._there = _Range(0, nbytes)
        self._here_reference = ctypes.byref(_Range(target, nbytes))
        self._there_reference = ctypes.byref(self._there)

    def read(self, source: int) -> None:
        """Copy from an address there.

        Raises:
            OSError: As for `read`.
        """
        self._there.base = source
        count = _LIBC.process_vm_readv(self._pid, self._here_reference, 1, self._there_reference, 1, 0)
        if count != self._nbytes:
            error = ctypes.get_errno()
            raise OSError(error, f"{os.strerror(error)} (reading {self._nbytes} bytes of process {self._pid})")
