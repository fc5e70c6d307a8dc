"""What boost does with data on several ranks: splits samples, compares batches, gathers values per sample."""

from __future__ import annotations

from booster_runtime.data.batches import (
    call_with,
    fields_of,
    hidden_tensors,
    hides_tensors,
    leaves_by_path,
    move_batch,
    named_forward,
    num_samples,
    taken_by,
    tensors_of,
    with_fields,
)
from booster_runtime.data.loader import DistributedDataLoader
from booster_runtime.data.order import OwnDraws, host_draws, restore_host_draws
from booster_runtime.data.prepare import prepare_dataloader
from booster_runtime.data.shard import compare_splits, shard_dataloader, split_and_agree
from booster_runtime.data.watches import show_first_batch

__all__ = [
    "DistributedDataLoader",
    "OwnDraws",
    "call_with",
    "compare_splits",
    "fields_of",
    "hidden_tensors",
    "hides_tensors",
    "host_draws",
    "leaves_by_path",
    "move_batch",
    "named_forward",
    "num_samples",
    "prepare_dataloader",
    "restore_host_draws",
    "shard_dataloader",
    "show_first_batch",
    "split_and_agree",
    "taken_by",
    "tensors_of",
    "with_fields",
]
