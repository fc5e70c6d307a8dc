"""Memories other than RAM and devices that can hold tensors."""

from __future__ import annotations

from booster_runtime.memory.mapped import MappedFolder

__all__ = [
    "MappedFolder",
]
