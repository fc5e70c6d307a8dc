"""Giving each data parallel rank its own samples, in an order that can be resumed with another number of ranks."""

from __future__ import annotations

from booster_core.data.iterable import ShardedIterable
from booster_core.data.loader import DistributedDataLoader
from booster_core.data.prepare import deal_dataset, prepare_dataloader
from booster_core.data.sampler import DealtOrder, ShardedSampler, wrap_seed

__all__ = [
    "DealtOrder",
    "DistributedDataLoader",
    "ShardedIterable",
    "ShardedSampler",
    "deal_dataset",
    "prepare_dataloader",
    "wrap_seed",
]
