"""Which part of which tensor of the user's model this rank holds: shards, the adapters that list them, and names."""

from __future__ import annotations

from booster_core.state.adapter import JSONValue, ParamGroup, StateAdapter, TensorMeta
from booster_core.state.names import (
    NamedTensors,
    compiled_module,
    extra_state_modules,
    named_modules,
    own_class,
    without_adapters,
)
from booster_core.state.shard import Box, TensorShard, box_numel, box_shape, full_box

__all__ = [
    "Box",
    "JSONValue",
    "NamedTensors",
    "ParamGroup",
    "StateAdapter",
    "TensorMeta",
    "TensorShard",
    "box_numel",
    "box_shape",
    "compiled_module",
    "extra_state_modules",
    "full_box",
    "named_modules",
    "own_class",
    "without_adapters",
]
