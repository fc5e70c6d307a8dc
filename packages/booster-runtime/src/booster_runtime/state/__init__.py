"""What every strategy needs to show its state: box arithmetic, values as JSON, and the adapter for whole models."""

from __future__ import annotations

from booster_runtime.state.jsonable import decode_json, encode_json, tensor_references
from booster_runtime.state.local_state import mark_as_local, refuse_pickle
from booster_runtime.state.optimizer_state import flatten_state, restore_state, unsaved_state
from booster_runtime.state.regions import (
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
from booster_runtime.state.replicated import MASTER, Replica, ReplicatedStateAdapter, balanced_shards

__all__ = [
    "MASTER",
    "Region",
    "Replica",
    "ReplicatedStateAdapter",
    "balanced_shards",
    "decode_json",
    "encode_json",
    "flatten_state",
    "intersect",
    "is_contiguous",
    "mark_as_local",
    "pack",
    "refuse_pickle",
    "regions_of",
    "restore_state",
    "runs_of",
    "slices_of",
    "span_of",
    "tensor_references",
    "unpack",
    "unsaved_state",
]
