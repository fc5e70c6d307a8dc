"""Making data loaders over a data set whose samples are split between ranks."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch.utils.data import DataLoader, IterableDataset, Sampler

from booster_core.data.iterable import ShardedIterable
from booster_core.data.loader import DistributedDataLoader
from booster_core.data.sampler import ShardedSampler
from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import Dataset


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

    Every rank gets equally many batches: samples at the end of an epoch are repeated where they don't divide by the
    number of ranks. Metrics leave them out by `Booster.gather_for_metrics` or `DistributedDataLoader.without_padding`.

    Args:
        dataset: A data set with a length, split by a `ShardedSampler`; or an iterable one, dealt out item by item.
        batch_size: Samples per batch and rank; at least 1.
        shuffle: Draw a new order each epoch; not possible for iterable data sets.
        seed: Seed of the order and of the workers; must be equal on all ranks.
        drop_last: Leave out the last batch where it would be smaller, or samples that don't divide by the ranks.
        pin_memory: Copy batches to pinned memory, for faster transfers to a GPU.
        num_workers: Processes that load ahead; 0 loads in this one.
        distributed_sampler_cls: Sampler of your own that knows of ranks, constructed as
            ``cls(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)``.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        **kwargs: Further arguments of ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: If ``seed`` is no integer.
        ConfigError: If ``batch_size`` is below 1, the data set has fewer samples than there are ranks, or an iterable
            data set is to be shuffled.

    Collective: none.
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
                "`boost`, which deals what it draws to ranks, or use `distributed_sampler_cls`."
            )
            raise ConfigError(msg)
    if isinstance(dataset, IterableDataset) and (shuffle or distributed_sampler_cls is not None):
        msg = "An iterable data set has no order to shuffle or sample from. Shuffle inside the data set, by a buffer."
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
    return deal_dataset(dataset, shuffle=shuffle, **settings)


def deal_dataset(
    dataset: Dataset[Any],
    *,
    make: Callable[..., DataLoader[Any]] = DistributedDataLoader,
    shuffle: bool,
    rank: int,
    world_size: int,
    seed: int,
    drop_last: bool,
    **settings: Any,
) -> DataLoader[Any]:
    """Return a loader that deals out a data set, in its own order or shuffled by the seed.

    Args:
        dataset: The data set.
        make: Makes the loader, with the arguments of `DistributedDataLoader`.
        shuffle: Draw a new order each epoch.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seed of the order and of the workers.
        drop_last: Leave out an incomplete batch or group.
        **settings: Further arguments of ``DataLoader``.

    Collective: none.
    """
    place: dict[str, Any] = {"rank": rank, "world_size": world_size}
    sampler: Sampler[int] | None = None
    if isinstance(dataset, IterableDataset):
        dataset = ShardedIterable(dataset, drop_last=drop_last, **place)
    else:
        num_samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
        sampler = ShardedSampler(num_samples, shuffle=shuffle, seed=seed, drop_last=drop_last, **place)
    return make(dataset, sampler=sampler, seed=seed, drop_last=drop_last, **place, **settings)
