"""Memories for tensors other than a device's and the C library's heap: whole pages, and files; and copies to them."""

from __future__ import annotations

from booster_runtime.memory.absent import AbsentTensors, is_absent, only_describes, sees_all_uses, values_of
from booster_runtime.memory.host_memory import (
    ALIGNMENT,
    CopyStream,
    OffloadFolder,
    aligned,
    aligned_buffer,
    block_bytes,
    has_values,
    host_stands_for_device,
    locked_buffer,
    without_values,
    zeros_in_pages,
)

__all__ = [
    "ALIGNMENT",
    "AbsentTensors",
    "CopyStream",
    "OffloadFolder",
    "aligned",
    "aligned_buffer",
    "block_bytes",
    "has_values",
    "host_stands_for_device",
    "is_absent",
    "locked_buffer",
    "only_describes",
    "sees_all_uses",
    "values_of",
    "without_values",
    "zeros_in_pages",
]
