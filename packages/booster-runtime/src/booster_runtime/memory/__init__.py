"""Memories for tensors other than a device's and the C library's heap: files and whole pages; and copies to them."""

from __future__ import annotations

from booster_runtime.memory.blocks import block_bytes, host_stands_for_device
from booster_runtime.memory.copy_stream import CopyStream
from booster_runtime.memory.host_memory import (
    ALIGNMENT,
    MappedFolder,
    OffloadFolder,
    aligned,
    aligned_buffer,
    locked_buffer,
    zeros_in_pages,
)

__all__ = [
    "ALIGNMENT",
    "CopyStream",
    "MappedFolder",
    "OffloadFolder",
    "aligned",
    "aligned_buffer",
    "block_bytes",
    "host_stands_for_device",
    "locked_buffer",
    "zeros_in_pages",
]
