"""Making data loaders over a data set whose samples are split between ranks."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch.utils.data import IterableDataset, Sampler

from booster_core.errors import ConfigError
from booster_runtime.data.iterable import ShardedIterable, check_whole
from booster_runtime.data.loader import DistributedDataLoader
from booster_runtime.data.order import ShardedSampler
from booster_runtime.data.streams import StreamShards, num_shards_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset


def prepare_dataloader(
    dataset: Dataset[Any],
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    distributed_sampler_cls: type[Sampler[int]] | None = None,
    rank: int,
    world_size: int,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Return a data loader over this rank's samples.

    Arguments and errors are those of `booster_core.Plugin.prepare_dataloader`; ``rank`` and ``world_size`` count the
    ranks that see different samples.
    """
    if batch_size is None or batch_size < 1:
        msg = f"`batch_size={batch_size}` must be at least 1: it is the number of samples per rank and step."
        raise ConfigError(msg)
    if not isinstance(seed, SupportsIndex):
        msg = f"`seed` is an integer, equal on all ranks; got `{seed!r}`."
        raise TypeError(msg)
    seed = operator.index(seed)  # numpy's integers overflow
    for name in ("sampler", "batch_sampler"):
        if kwargs.get(name) is not None:
            msg = (
                f"`{name}` can't be passed here, where samples are split between ranks. Pass a `DataLoader` with it to "
                "`boost`, which splits what it draws between ranks, or use `distributed_sampler_cls`."
            )
            raise ConfigError(msg)
    check_whole(dataset)
    if isinstance(dataset, IterableDataset) and (shuffle or distributed_sampler_cls is not None):
        msg = "An iterable data set has no order to shuffle or sample from. Shuffle inside the data set, by a buffer."
        raise ConfigError(msg)
    if shuffle and distributed_sampler_cls is None and kwargs.get("generator") is not None:
        msg = (
            "`generator` of `prepare_dataloader` would not decide on the order of samples, which is drawn from `seed` "
            "for each epoch. Pass `seed`, or give `boost` a `DataLoader(..., shuffle=True, generator=generator)`."
        )
        raise ConfigError(msg)
    settings = {
        "rank": rank,
        "world_size": world_size,
        "seed": seed,
        "batch_size": batch_size,
        "drop_last": drop_last,
        "pin_memory": pin_memory,
        "num_workers": num_workers,
        **kwargs,
    }
    if distributed_sampler_cls is not None:
        make_sampler: Any = distributed_sampler_cls
        sampler = make_sampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        return DistributedDataLoader(dataset, sampler=sampler, **settings)
    return shard_dataset(dataset, shuffle=shuffle, **settings)


def shard_dataset(
    dataset: Dataset[Any],
    *,
    shuffle: bool,
    rank: int,
    world_size: int,
    seed: int,
    drop_last: bool,
    **settings: Any,
) -> DistributedDataLoader:
    """Return a loader that splits a data set between ranks, in its own order or shuffled by the seed.

    Args:
        dataset: The data set.
        shuffle: Draw a new order each epoch.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seed of the order and of the workers.
        drop_last: Leave out an incomplete batch or group.
        **settings: Further arguments of ``DataLoader``.
    """
    place: dict[str, Any] = {"rank": rank, "world_size": world_size}
    sampler: Sampler[int] | None = None
    if isinstance(dataset, IterableDataset):
        num_shards = num_shards_of(dataset)
        if num_shards is not None and num_shards >= world_size:
            dataset = StreamShards(dataset, num_shards=num_shards, seed=seed, drop_last=drop_last, **place)
        else:
            dataset = ShardedIterable(dataset, seed=seed, drop_last=drop_last, **place)
    else:
        num_samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
        sampler = ShardedSampler(num_samples, shuffle=shuffle, seed=seed, drop_last=drop_last, **place)
    return DistributedDataLoader(dataset, sampler=sampler, seed=seed, drop_last=drop_last, **place, **settings)
