"""ZeRO stages 1 and 2 with offload to the host or its disk, as a plugin of Booster."""

from __future__ import annotations

from booster_zero.config import ZeroConfig
from booster_zero.plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin", "ZeroConfig"]
