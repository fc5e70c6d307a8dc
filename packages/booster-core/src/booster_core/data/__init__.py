"""Giving each data parallel rank its own samples, in an order that can be resumed with another number of ranks."""

from __future__ import annotations

from booster_core.data.loader import DistributedDataLoader, prepare_dataloader, split_dataloader
from booster_core.data.sampler import ShardedIterable, ShardedSampler

__all__ = ["DistributedDataLoader", "ShardedIterable", "ShardedSampler", "prepare_dataloader", "split_dataloader"]
