"""The engine of ZeRO, which Gemini and hybrid parallelism share: buckets, their layout, reduction, steps and state."""

from __future__ import annotations

from booster_zero.engine.bucket import Bucket
from booster_zero.engine.buffer_pool import BufferPool, is_free
from booster_zero.engine.engine import ShardedEngine, engine_of
from booster_zero.engine.formats import Format
from booster_zero.engine.gatherer import Gatherer
from booster_zero.engine.gradients import holder_of, keeping_gradients, keeping_shards, set_gradient
from booster_zero.engine.layout import Layout
from booster_zero.engine.listed import ListedParameters
from booster_zero.engine.memory import FlatBuffer, Key, Memory, Role
from booster_zero.engine.optimizer import ShardedOptimizer
from booster_zero.engine.options import ShardingOptions
from booster_zero.engine.partition import assign_owners, default_bucket_bytes, plan_flat
from booster_zero.engine.parts import only
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
    "keeping_shards",
    "only",
    "plan_flat",
    "set_gradient",
]
