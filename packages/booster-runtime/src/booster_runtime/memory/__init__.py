"""Memories for tensors other than a device's and the C library's heap: files of a folder, and whole pages."""

from __future__ import annotations

from booster_runtime.memory.folder import OffloadFolder
from booster_runtime.memory.mapped import MappedFolder
from booster_runtime.memory.pages import ALIGNMENT, aligned, aligned_buffer, zeros_in_pages

__all__ = [
    "ALIGNMENT",
    "MappedFolder",
    "OffloadFolder",
    "aligned",
    "aligned_buffer",
    "zeros_in_pages",
]
