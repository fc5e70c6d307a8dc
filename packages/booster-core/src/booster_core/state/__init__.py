"""Which part of which tensor of the user's model this rank holds: shards, the adapters that list them, and names."""

from __future__ import annotations

from booster_core.state.adapter import JSONValue, ParamGroup, StateAdapter, TensorMeta
from booster_core.state.json_values import decode_json, encode_json, tensor_references
from booster_core.state.names import (
    NamedTensors,
    compiled_module,
    extra_state_modules,
    frozen_base,
    has_adapters,
    is_adapted,
    named_modules,
    own_class,
    without_adapters,
)
from booster_core.state.optimizer_state import flatten_state, restore_state, unsaved_state
from booster_core.state.regions import (
    Region,
    as_bytes,
    intersect,
    is_contiguous,
    pack,
    regions_of,
    runs_of,
    slices_of,
    span_of,
    unpack,
)
from booster_core.state.replicated import MASTER, Replica, ReplicatedStateAdapter, balanced_shards
from booster_core.state.shard import Box, TensorShard, box_numel, box_shape, full_box
from booster_core.state.view import ModelView

__all__ = [
    "MASTER",
    "Box",
    "JSONValue",
    "ModelView",
    "NamedTensors",
    "ParamGroup",
    "Region",
    "Replica",
    "ReplicatedStateAdapter",
    "StateAdapter",
    "TensorMeta",
    "TensorShard",
    "as_bytes",
    "balanced_shards",
    "box_numel",
    "box_shape",
    "compiled_module",
    "decode_json",
    "encode_json",
    "extra_state_modules",
    "flatten_state",
    "frozen_base",
    "full_box",
    "has_adapters",
    "intersect",
    "is_adapted",
    "is_contiguous",
    "named_modules",
    "own_class",
    "pack",
    "regions_of",
    "restore_state",
    "runs_of",
    "slices_of",
    "span_of",
    "tensor_references",
    "unpack",
    "unsaved_state",
    "without_adapters",
]
