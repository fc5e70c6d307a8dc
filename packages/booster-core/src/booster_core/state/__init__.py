"""Which part of which tensor of the user's model lies on this rank: shards, and the adapters that list them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core._lazy import public_names

if TYPE_CHECKING:
    from booster_core.state.adapted import has_adapters, is_adapted, without_adapters
    from booster_core.state.adapter import JSONValue, ParamGroup, StateAdapter, TensorMeta
    from booster_core.state.jsonable import decode, encode, tensor_references
    from booster_core.state.naming import NamedTensors, compiled_module, extra_state_modules, named_modules, own_class
    from booster_core.state.optimizer_state import flatten_state, restore_state
    from booster_core.state.regions import (
        Region,
        intersect,
        is_contiguous,
        pack,
        regions_of,
        runs_of,
        slices_of,
        span_of,
        unpack,
    )
    from booster_core.state.replicated import MASTER, HolderRank, ReplicatedStateAdapter, balanced_shards
    from booster_core.state.shard import Box, TensorShard, box_numel, box_shape, full_box

__all__ = [
    "MASTER",
    "Box",
    "HolderRank",
    "JSONValue",
    "NamedTensors",
    "ParamGroup",
    "Region",
    "ReplicatedStateAdapter",
    "StateAdapter",
    "TensorMeta",
    "TensorShard",
    "balanced_shards",
    "box_numel",
    "box_shape",
    "compiled_module",
    "decode",
    "encode",
    "extra_state_modules",
    "flatten_state",
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
    "without_adapters",
]

__getattr__, __dir__ = public_names(
    __name__,
    {
        ".adapted": ["has_adapters", "is_adapted", "without_adapters"],
        ".adapter": ["JSONValue", "ParamGroup", "StateAdapter", "TensorMeta"],
        ".jsonable": ["decode", "encode", "tensor_references"],
        ".naming": ["NamedTensors", "compiled_module", "extra_state_modules", "named_modules", "own_class"],
        ".optimizer_state": ["flatten_state", "restore_state"],
        ".regions": [
            "Region",
            "intersect",
            "is_contiguous",
            "pack",
            "regions_of",
            "runs_of",
            "slices_of",
            "span_of",
            "unpack",
        ],
        ".replicated": ["MASTER", "HolderRank", "ReplicatedStateAdapter", "balanced_shards"],
        ".shard": ["Box", "TensorShard", "box_numel", "box_shape", "full_box"],
    },
)
