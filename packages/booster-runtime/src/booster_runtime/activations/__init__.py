"""Less memory for activations: recompute them in backward, all or all but the expensive ones, or keep them on the host.

Users import checkpointing from `booster_runtime`.
"""

from __future__ import annotations

from booster_runtime.activations.checkpointing import (
    disable_activation_checkpointing,
    disable_activation_offload,
    enable_activation_checkpointing,
    enable_activation_offload,
)
from booster_runtime.activations.selection import select_modules

__all__ = [
    "disable_activation_checkpointing",
    "disable_activation_offload",
    "enable_activation_checkpointing",
    "enable_activation_offload",
    "select_modules",
]
