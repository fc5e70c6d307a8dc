"""Making data loaders whose samples are split between ranks: from a data set, or from a loader of the user's."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from booster_core.data.iterable import ShardedIterable
from booster_core.data.loader import DistributedDataLoader
from booster_core.data.pass_watch import watch_passes
from booster_core.data.sampler import ShardedSampler
from booster_core.data.user_order import UserOrder
from booster_core.errors import ConfigError
from booster_core.ranks.rendezvous import name_ranks

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from booster_core.plugin.interface import Plugin
    from booster_core.ranks.coordinator import DistCoordinator


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
    return _dealt(dataset, shuffle=shuffle, **settings)


def split_dataloader(loader: DataLoader[Any], *, rank: int, world_size: int, seed: int) -> DataLoader[Any]:
    """Return a loader like the given one whose samples are split between ranks, or the loader itself where they are.

    A plain loader would show every rank the same samples. Its batch size counts samples per rank from here on. The
    order is that of ``torch.utils.data.DistributedSampler`` where the loader shuffles or does not, and what its sampler
    draws where that is the user's, or has a generator. Batches of a batch sampler are dealt whole, one to each rank in
    turn; where some ranks would have none at the end, they get batches of the epoch's start again.

    Args:
        loader: The user's loader.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seed of the order; equal on all ranks.

    Raises:
        ConfigError: If the loader can't be split: its class iterates in a way of its own, or batches may come in
            another order than they were asked for.

    Collective: none.
    """
    batch_sampler = loader.batch_sampler
    samplers = (loader.sampler, getattr(batch_sampler, "sampler", None))
    if isinstance(loader, DistributedDataLoader) or any(isinstance(each, DistributedSampler) for each in samplers):
        return loader
    own = [name for name in ("__iter__", "_get_iterator") if getattr(type(loader), name) is not vars(DataLoader)[name]]
    if own:
        if world_size == 1:
            return loader
        msg = (
            f"The data loader is a `{type(loader).__name__}` with an `{own[0]}` of its own, which would be lost where "
            f"its samples are split between {world_size} ranks. Pass a plain `DataLoader`, or leave it out of `boost` "
            "and let it split samples by rank itself."
        )
        raise ConfigError(msg)
    if not loader.in_order:
        msg = "`in_order=False` of the data loader leaves open which samples a batch has. Leave it out."
        raise ConfigError(msg)
    settings = {
        "rank": rank,
        "world_size": world_size,
        "seed": seed,
        "pin_memory": loader.pin_memory,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": seed}
    if loader.batch_size is None and batch_sampler is not None:
        order = UserOrder(batch_sampler, drop_last=getattr(batch_sampler, "drop_last", False) is True, **place)
        return DistributedDataLoader(loader.dataset, batch_sampler=order, **settings)
    settings |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    shuffles = _is_plain_shuffle(loader)
    if isinstance(loader.dataset, IterableDataset) or type(loader.sampler) is SequentialSampler or shuffles:
        return _dealt(loader.dataset, shuffle=shuffles, **settings)
    order = UserOrder(loader.sampler, drop_last=loader.drop_last, **place)
    return DistributedDataLoader(loader.dataset, sampler=order, **settings)


def deal_dataloader(loader: DataLoader[Any], plugin: Plugin, coordinator: DistCoordinator) -> DataLoader[Any]:
    """Split a user's loader between data parallel ranks, and check that all ranks draw the same order of samples.

    Args:
        loader: The user's loader.
        plugin: Tells which ranks see different samples.
        coordinator: Lets ranks agree on a seed, and compare.

    Raises:
        ConfigError: If the loader can't be split, or its sampler draws another order on some ranks.

    Collective: every rank of the world.
    """
    # Ranks that seeded themselves apart would shuffle apart, and see some samples twice and others never.
    seed = coordinator.broadcast_object(torch.initial_seed())
    error: Exception | None = None
    digest: str | None = None
    try:
        rank, world_size = plugin.data_parallel_coordinates(coordinator)
        loader = split_dataloader(loader, rank=rank, world_size=world_size, seed=seed)
        digest = loader.order_digest() if isinstance(loader, DistributedDataLoader) else None
    except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
        error = caught
    coordinator.raise_together(error)
    digests = coordinator.all_gather_object(digest)
    apart = [other for other, theirs in enumerate(digests) if theirs != digests[0]]
    if apart:
        msg = (
            f"The data loader's sampler draws another order on {name_ranks(apart)} than on rank 0, so that samples "
            "can't be dealt to ranks: some would be seen twice, others never. Make it alike on every rank, and seed "
            "random numbers of its own alike. If it splits samples by rank itself, leave the loader out of `boost`, or "
            "make it a `torch.utils.data.DistributedSampler`."
        )
        raise ConfigError(msg)
    if isinstance(loader, DistributedDataLoader):
        loader.pass_watch = watch_passes(coordinator.world_size)
    return loader


def _dealt(
    dataset: Dataset[Any], *, shuffle: bool, rank: int, world_size: int, seed: int, drop_last: bool, **settings: Any
) -> DataLoader[Any]:
    """Return a loader that deals out a data set, in its own order or shuffled by the seed."""
    place: dict[str, Any] = {"rank": rank, "world_size": world_size}
    sampler: Sampler[int] | None = None
    if isinstance(dataset, IterableDataset):
        dataset = ShardedIterable(dataset, drop_last=drop_last, **place)
    else:
        num_samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
        sampler = ShardedSampler(num_samples, shuffle=shuffle, seed=seed, drop_last=drop_last, **place)
    return DistributedDataLoader(dataset, sampler=sampler, seed=seed, drop_last=drop_last, **place, **settings)


def _is_plain_shuffle(loader: DataLoader[Any]) -> bool:
    """Return whether a loader draws each sample once, in an order that no generator of the user's decides on."""
    sampler = loader.sampler
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.generator in (None, torch.default_generator)
        and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
    )
