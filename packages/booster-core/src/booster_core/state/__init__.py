"""Which part of which tensor of the user's model this rank holds: shards, the adapters that list them, and names."""

from __future__ import annotations

from booster_core.state.adapter import JSONValue, ParamGroup, StateAdapter, TensorMeta
from booster_core.state.json_values import (
    check_plain_tensors,
    decode_extra_state,
    decode_json,
    encode_json,
    parse_json,
    read_json,
    tensor_references,
)
from booster_core.state.names import (
    NamedTensors,
    check_model_is_saved_whole,
    compiled_module,
    distinct,
    extra_state_modules,
    frozen_base,
    has_adapters,
    is_adapted,
    named_modules,
    natural_order,
    own_class,
    without_adapters,
)
from booster_core.state.optimizer_info import OptimizerInfo, check_optimizer_is_saved_whole
from booster_core.state.optimizer_state import flatten_state, restore_state, unsaved_state
from booster_core.state.random_state import capture_random_state, restore_random_state
from booster_core.state.regions import (
    Region,
    as_bytes,
    copy_part,
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
from booster_core.state.scheduler import scheduler_from_json, scheduler_state, scheduler_to_json
from booster_core.state.shard import Box, TensorShard, box_numel, box_shape, full_box
from booster_core.state.view import ModelView

__all__ = [
    "MASTER",
    "Box",
    "JSONValue",
    "ModelView",
    "NamedTensors",
    "OptimizerInfo",
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
    "capture_random_state",
    "check_model_is_saved_whole",
    "check_optimizer_is_saved_whole",
    "check_plain_tensors",
    "compiled_module",
    "copy_part",
    "decode_extra_state",
    "decode_json",
    "distinct",
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
    "natural_order",
    "own_class",
    "pack",
    "parse_json",
    "read_json",
    "regions_of",
    "restore_random_state",
    "restore_state",
    "runs_of",
    "scheduler_from_json",
    "scheduler_state",
    "scheduler_to_json",
    "slices_of",
    "span_of",
    "tensor_references",
    "unpack",
    "unsaved_state",
    "without_adapters",
]
