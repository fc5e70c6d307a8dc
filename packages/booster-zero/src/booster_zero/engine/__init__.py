"""The engine of ZeRO, which Gemini and hybrid parallelism share: buckets, their layout, reduction, steps and state."""

from __future__ import annotations

from booster_zero.engine.bucket import Bucket
from booster_zero.engine.engine import ShardedEngine, engine_of
from booster_zero.engine.gatherer import Gatherer
from booster_zero.engine.layout import Layout, ListedParameters
from booster_zero.engine.memory import BufferPool, FlatBuffer, Key, Memory, Role, is_free
from booster_zero.engine.optimizer import (
    ShardedOptimizer,
    holder_of,
    keeping_gradients,
    only,
    set_gradient,
)
from booster_zero.engine.options import ShardingOptions
from booster_zero.engine.partition import Format, assign_owners, default_bucket_bytes, plan_flat
from booster_zero.engine.state import ShardedStateAdapter
from booster_zero.engine.states import Keep, WholeState

__all__ = [
    "Bucket",
    "BufferPool",
    "FlatBuffer",
    "Format",
    "Gatherer",
    "Keep",
    "Key",
    "Layout",
    "ListedParameters",
    "Memory",
    "Role",
    "ShardedEngine",
    "ShardedOptimizer",
    "ShardedStateAdapter",
    "ShardingOptions",
    "WholeState",
    "assign_owners",
    "default_bucket_bytes",
    "engine_of",
    "holder_of",
    "is_free",
    "keeping_gradients",
    "only",
    "plan_flat",
    "set_gradient",
]
