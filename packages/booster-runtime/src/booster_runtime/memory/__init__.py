"""Memories beside RAM and devices in which tensors may lie."""

from __future__ import annotations

from booster_runtime.memory.mapped import MappedFolder

__all__ = [
    "MappedFolder",
]
