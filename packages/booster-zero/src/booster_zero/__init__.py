"""ZeRO stages 1 and 2 with offload to the host or its disk, as a plugin of Booster, and what builds on it imports."""

from __future__ import annotations

from booster_zero.config import ZeroConfig
from booster_zero.engine.optimizer import ZeroOptimizer
from booster_zero.engine.state import ShardedStateAdapter
from booster_zero.lazy import fill_model
from booster_zero.model import ZeroModel
from booster_zero.plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin", "ShardedStateAdapter", "ZeroConfig", "ZeroModel", "ZeroOptimizer", "fill_model"]
