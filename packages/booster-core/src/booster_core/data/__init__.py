"""Giving each data parallel rank its own samples, in an order that can be resumed with another number of ranks."""

from __future__ import annotations

from booster_core.data.iterable import ShardedIterable
from booster_core.data.loader import DistributedDataLoader
from booster_core.data.sampler import ShardedSampler
from booster_core.data.splitting import deal_dataloader, prepare_dataloader, split_dataloader

__all__ = [
    "DistributedDataLoader",
    "ShardedIterable",
    "ShardedSampler",
    "deal_dataloader",
    "prepare_dataloader",
    "split_dataloader",
]
