"""Splitting a user's data loader between data parallel ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from booster_core.checkpoint_io import GlobalPosition, keeps_position
from booster_core.errors import ConfigError
from booster_core.plugin import as_tuple, like
from booster_core.state import common_seed
from booster_runtime.data.iterable import ShardedIterable, check_whole
from booster_runtime.data.loader import DistributedDataLoader
from booster_runtime.data.order import UserOrder
from booster_runtime.data.prepare import shard_dataset
from booster_runtime.data.watches import watch_passes, watch_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_core.plugin import BoostContext, Plugin
    from booster_core.ranks import DistCoordinator, Together

_REMEDY = (
    "Samples can't be split between ranks: some would be seen twice, others never, or a rank would wait for batches "
    "that others don't have. Pass the whole data set, and a sampler that draws alike on every rank, its random numbers "
    "seeded alike. Where the script splits samples by rank itself, leave that out, or leave the loader out of `boost`, "
    "or make its sampler a `torch.utils.data.DistributedSampler`."
)

_OF_THE_WHOLE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Torch's samplers that know of no ranks."""


def split_dataloader(loader: DataLoader[Any], *, rank: int, world_size: int, seed: int) -> DataLoader[Any]:
    """Return a loader like the given one whose samples are split between ranks, or the loader itself where they are.

    A plain loader would show every rank the same samples. Its batch size counts samples per rank from here on. The
    order is that of ``torch.utils.data.DistributedSampler`` where the loader shuffles or does not, and what its sampler
    draws where that is the user's, or has a generator. Each batch of a batch sampler goes to one rank, in turn; where
    some ranks would have none at the end, they get batches of the epoch's start again. The loader keeps its class and
    attributes; one rank keeps a loader that can't be split. A loader that keeps a position of its own is returned as it
    is: it has this rank's samples only.

    Args:
        loader: The user's loader.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seed of the order; equal on all ranks.

    Raises:
        ConfigError: If the loader can't be split: its class has its own ``__iter__``, or something else that a split
            loader needs, or batches may come in another order than they were asked for. If it is split otherwise, by a
            ``DistributedSampler`` of other numbers. If it keeps a position of its own, and is not split.
    """
    if _is_kept(loader, rank, world_size):
        return loader
    if not loader.in_order:
        msg = "`in_order=False` of the data loader leaves open which samples a batch has. Leave it out."
        raise ConfigError(msg)
    batch_sampler = loader.batch_sampler
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
        return _like(loader, DistributedDataLoader(loader.dataset, batch_sampler=order, **settings))
    settings |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    shuffles = _is_plain_shuffle(loader)
    if isinstance(loader.dataset, IterableDataset) or type(loader.sampler) is SequentialSampler or shuffles:
        return _like(loader, shard_dataset(loader.dataset, shuffle=shuffles, **settings))
    order = UserOrder(loader.sampler, drop_last=loader.drop_last, **place)
    return _like(loader, DistributedDataLoader(loader.dataset, sampler=order, **settings))


def _is_kept(loader: Any, rank: int, world_size: int) -> bool:
    """Return whether a loader is taken as it is: it is split already, or its one rank gets all of a class of its own.

    Raises:
        ConfigError: If it is not split in the way that it seems to be, or can't be split.
    """
    if not isinstance(loader, DataLoader):
        return True
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    split_by_owner = [each for each in samplers if isinstance(each, DistributedSampler)]
    for each in split_by_owner:
        _check_place(each, rank, world_size)
    if isinstance(loader, DistributedDataLoader) or split_by_owner:
        return True
    has_position, own = _has_own_position(loader), _own_methods(type(loader))
    if world_size > 1 and has_position:
        _check_own_share(loader)
    elif world_size > 1 and own:
        _refuse_class(type(loader), own)
    return has_position or bool(own)


def _check_place(sampler: DistributedSampler[Any], rank: int, world_size: int) -> None:
    """Refuse a sampler that its owner has made for other ranks, such as for all those that share a batch."""
    if (sampler.rank, sampler.num_replicas) != (rank, world_size):
        msg = (
            f"The data loader's `DistributedSampler` has `rank={sampler.rank}` of "
            f"`num_replicas={sampler.num_replicas}`, but of the ranks that see different samples this is rank {rank} "
            f"of {world_size}. Samples would be seen twice, or never. Pass a loader without the sampler, which `boost` "
            "splits, or make it with these numbers."
        )
        raise ConfigError(msg)


def _has_own_position(loader: object) -> bool:
    """Return whether a loader has a position of its own, as torchdata's ``StatefulDataLoader`` has."""
    return keeps_position(loader) and not isinstance(loader, DistributedDataLoader)


def _check_own_share(loader: DataLoader[Any]) -> None:
    """Refuse a loader that is taken as it is, and would show each rank samples of the whole data set."""
    batch_sampler = loader.batch_sampler
    sampler = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", batch_sampler)
    if not isinstance(loader.dataset, IterableDataset) and isinstance(sampler, _OF_THE_WHOLE):
        msg = (
            f"The data loader is a `{type(loader).__name__}`, whose `state_dict` is this rank's own position, so that "
            f"it is taken as it is; but its `{type(sampler).__name__}` draws from the whole data set on every rank. "
            "Pass `sampler=torch.utils.data.DistributedSampler(dataset)` to it, or pass a plain `DataLoader`, which "
            "`boost` splits and gives a `state_dict` that resumes at any sample on any number of ranks. Where the data "
            "set has this rank's samples only, leave the loader out of `boost`; `save_checkpoint` takes it."
        )
        raise ConfigError(msg)


def _own_methods(kind: type[DataLoader[Any]]) -> list[str]:
    """Return which of the methods that a split loader needs a loader's class has its own of."""
    needed = ("__iter__", "_get_iterator", *vars(GlobalPosition), *vars(DistributedDataLoader))
    return [
        name
        for name in dict.fromkeys(needed)
        if (name == "__iter__" or not name.startswith(("__", "_abc")))
        and name != "set_epoch"  # which is called too
        and getattr(kind, name, None) is not getattr(DataLoader, name, None)
    ]


def _refuse_class(kind: type[DataLoader[Any]], own: Sequence[str]) -> NoReturn:
    msg = (
        f"The data loader is a `{kind.__name__}`, whose own {', '.join(f'`{name}`' for name in own)} may not follow "
        "the split of samples between ranks. Pass a plain `DataLoader`, and wrap the loader that `boost` returns, by a "
        "generator or a class with an `__iter__`. Or let this one split samples by rank itself: with a "
        "`torch.utils.data.DistributedSampler`, or leave it out of `boost`."
    )
    raise ConfigError(msg)


def _like(loader: DataLoader[Any], split: DistributedDataLoader) -> DistributedDataLoader:
    """Give a split loader the user's class and attributes, where it has none of the name."""
    kind = type(loader)
    if kind is not DataLoader:
        own = {name: value for name, value in vars(loader).items() if not hasattr(split, name)}
        # A class made at run time: the user's methods and `isinstance` are to work, and a split loader's come first.
        described = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        split.__class__ = type(kind.__name__, (DistributedDataLoader, kind), described)
        vars(split).update(own)
    return split


def shard_dataloader(
    loader: DataLoader[Any] | Sequence[DataLoader[Any]] | None, plugin: Plugin, context: BoostContext
) -> Any:
    """Split a user's data loader, or each of several, between data parallel ranks; ``None`` stays ``None``.

    Batches are handed out on the run's device, unless the Booster leaves them. All ranks must draw the same order.

    Args:
        loader: The loader, or several in a list or tuple.
        plugin: Tells which ranks see different samples.
        context: Of the ``boost``.

    Raises:
        ConfigError: If a loader can't be split, or its sampler draws another order on some ranks.

    Collective: every rank of the world.
    """
    loaders = as_tuple(loader)
    splits: Sequence[_Split] = context.prepared.pop(_prepared_key(plugin), ())
    if [id(split.given) for split in splits] != [id(each) for each in loaders]:
        with context.coordinator.together("boost") as meeting:
            splits = [_Split(each, plugin, context.coordinator, meeting) for each in loaders]
    made = [split.finish() for split in splits]
    for each in made:
        if isinstance(each, DistributedDataLoader) and context.device_placement:
            each.device = context.device
    return like(loader, made)


def split_and_agree(loader: DataLoader[Any], plugin: Plugin, coordinator: DistCoordinator) -> DataLoader[Any]:
    """Split a user's loader between data parallel ranks, and check that all ranks have the same samples in one order.

    Args:
        loader: The user's loader.
        plugin: Tells which ranks see different samples.
        coordinator: Lets ranks agree on a seed, and compare.

    Raises:
        ConfigError: If the loader can't be split, or its data set has another length or its sampler draws another order
            on some ranks.

    Collective: every rank of the world.
    """
    with coordinator.together("boost") as meeting:
        split = _Split(loader, plugin, coordinator, meeting)
    return split.finish()


def compare_splits(
    loader: DataLoader[Any] | Sequence[DataLoader[Any]] | None, plugin: Plugin, context: BoostContext, meeting: Together
) -> None:
    """Do for `shard_dataloader` what comes before anything is changed, and compare between ranks in a meeting.

    Args:
        loader: As for `shard_dataloader`, which is called with the same plugin after the meeting.
        plugin: The same.
        context: The same; keeps what was found out.
        meeting: Of all ranks.

    Raises:
        ConfigError: If a loader can't be split.
    """
    splits = [_Split(each, plugin, context.coordinator, meeting) for each in as_tuple(loader)]
    context.prepared[_prepared_key(plugin)] = splits


def _prepared_key(plugin: Plugin) -> str:
    return f"data loaders split by plugin {id(plugin)}"


class _Split:
    """The split of one loader, which ranks compare in a meeting.

    Raises:
        ConfigError: If the loader can't be split.
    """

    def __init__(self, given: DataLoader[Any], plugin: Plugin, coordinator: DistCoordinator, meeting: Together) -> None:
        self.given, self._plugin, self._coordinator = given, plugin, coordinator
        self._seed = common_seed()
        self._facts = self._split(self._seed)
        meeting.compare([self._seed, self._facts], differs=self._settle)

    def _split(self, seed: int) -> dict[str, Any]:
        """Split the loader; return what ranks must have alike, and is known to be only where their seeds are."""
        if not _has_own_position(self.given):
            check_whole(getattr(self.given, "dataset", None))
        rank, world_size = self._plugin.data_parallel_coordinates(self._coordinator)
        self._loader = loader = split_dataloader(self.given, rank=rank, world_size=world_size, seed=seed)
        if _has_own_position(loader):
            return {"class of the data loader": type(loader).__name__}
        digest = loader.order_digest() if isinstance(loader, DistributedDataLoader) else None
        return {**_lengths_of(loader), "order of the data loader's sampler": digest}

    def _settle(self) -> None:
        """Split by the first rank's seed: ranks that seeded themselves apart would see samples twice, and others never.

        Raises:
            ConfigError: If ranks don't have the same samples in one order.

        Collective: every rank of the world.
        """
        seeds = self._coordinator.all_gather_object(self._seed, name="boost", meets=False)
        with self._coordinator.together("boost") as meeting:
            if len(set(seeds)) > 1:  # on the first rank too: a sampler may have a state that drawing changes
                self._facts = self._split(seeds[0])
            meeting.compare(self._facts, remedy=_REMEDY)

    def finish(self) -> DataLoader[Any]:
        """Return the loader, watched from now on."""
        loader, world_size = self._loader, self._coordinator.world_size
        if isinstance(loader, DistributedDataLoader):
            stream = watch_stream(world_size)
            loader.on_item = None if stream is None else stream.at_batch
            watch = watch_passes(world_size)
            loader.on_batch = None if watch is None else watch.at_batch
        return loader


def _lengths_of(loader: DataLoader[Any]) -> dict[str, int | None]:
    """Return how many samples a loader's whole data set has, and how many entries a sampler of the user's draws."""
    dataset: Any = loader.dataset
    if isinstance(dataset, ShardedIterable):
        dataset = dataset.dataset
    num_samples: int | None = None
    with contextlib.suppress(TypeError, NotImplementedError):  # not all have one
        num_samples = len(dataset)
    num_entries = loader.num_samples if isinstance(loader, DistributedDataLoader) else None
    return {"length of the data loader's data set": num_samples, "length of its sampler": num_entries}


def _is_plain_shuffle(loader: DataLoader[Any]) -> bool:
    """Return whether a loader draws each sample once, in an order that no generator of the user's decides on."""
    sampler = loader.sampler
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.generator in (None, torch.default_generator)
        and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
    )
