"""ZeRO stages 1 and 2 with offload to the host or its disk, as a plugin of Booster, and what builds on it imports."""

from __future__ import annotations

from booster_zero import torch_private as _torch_private  # noqa: F401 - which checks them
from booster_zero.config import ZeroConfig
from booster_zero.engine.optimizer import ShardedOptimizer
from booster_zero.engine.state import ShardedStateAdapter
from booster_zero.model import ShardedModel, fill_model
from booster_zero.plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin", "ShardedModel", "ShardedOptimizer", "ShardedStateAdapter", "ZeroConfig", "fill_model"]
