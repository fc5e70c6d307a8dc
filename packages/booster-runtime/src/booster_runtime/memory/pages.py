"""Host memory in whole pages, which files can be read into directly and which goes back to the system when freed."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 4096
"""Offsets, lengths and addresses of direct file I/O are multiples of this many bytes."""


def aligned(num_bytes: int) -> int:
    """Return a number of bytes rounded up to what direct file I/O can move."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int) -> Tensor:
    """Return zeroed memory for direct file I/O: 1-D uint8 of whole pages, given back with its last tensor."""
    pages = mmap.mmap(-1, aligned(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def zeros_in_pages(numel: int, dtype: torch.dtype) -> Tensor:
    """Return 1-D zeros on the CPU whose memory goes back to the system when freed; a C library's heap may keep it."""
    if not numel:
        return torch.zeros(0, dtype=dtype)
    num_bytes = numel * dtype.itemsize
    return aligned_buffer(num_bytes)[:num_bytes].view(dtype)
