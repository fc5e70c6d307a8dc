"""A data loader that splits its samples between ranks and knows how far it has come in their global order."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from booster_core.data.sampler import ShardedIterable, ShardedSampler, wrap_seed
from booster_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import Dataset


class DistributedDataLoader(DataLoader[Any]):
    """A ``DataLoader`` whose position is counted in samples of the global order, as batches are handed out.

    Batches that workers have prefetched but nobody has seen don't count. The epoch moves on by itself at the end of
    each pass, or by `set_epoch`.

    Args:
        dataset: A data set, or a `ShardedIterable`.
        world_size: Number of ranks that see different samples.
        seed: Seeds the workers (per rank and epoch).
        rank: Index of this rank among them.
        **kwargs: The arguments of ``DataLoader``.
    """

    def __init__(self, dataset: Dataset[Any], *, rank: int, world_size: int, seed: int, **kwargs: Any) -> None:
        self._own_generator = kwargs.get("generator") is None
        if self._own_generator:
            kwargs["generator"] = torch.Generator()
        super().__init__(dataset, **kwargs)
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._position = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch that is being, or is about to be, iterated."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration follows.

        Collective: none, but every rank must choose the same.
        """
        if epoch != self._epoch:
            self._position = 0
        self._epoch = epoch
        for target in (self.sampler, self.dataset):
            set_epoch = getattr(target, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator class
        source = self._source()
        self.set_epoch(self._own_epoch())
        if self._own_generator:
            # Workers draw their seeds from here: another on every rank and in every epoch, the same in a resumed run.
            self.generator.manual_seed(wrap_seed((self._seed * 1_000_003 + self._epoch) * 65_537 + self._rank))
        self._position = start = source.start if source is not None else 0
        batches = super().__iter__()
        per_step = (self.batch_size or 1) * self._world_size
        for number, batch in enumerate(batches, start=1):
            if source is not None:
                source.start = 0  # the next iteration begins a pass of its own
            end = self.num_samples
            self._position = start + number * per_step if end is None else min(start + number * per_step, end)
            yield batch
        self.set_epoch(self._epoch + 1)

    @property
    def num_samples(self) -> int | None:
        """Samples in the whole data set; ``None`` for iterable ones."""
        return self.sampler.num_samples if isinstance(self.sampler, ShardedSampler) else None

    def state_dict(self) -> dict[str, int | None]:
        """Return the epoch and the position in samples of the global order; the same on every rank.

        Raises:
            CheckpointError: If the loader has a sampler of the user's, whose position is unknown.
        """
        self._positioned_source("saved")
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_samples": self.num_samples,
            "seed": self.sampler.seed if isinstance(self.sampler, ShardedSampler) else self._seed,
        }

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Continue where a run with any number of ranks stood: the next iteration yields what it had not seen.

        Raises:
            CheckpointError: If the position was saved for a data set of another size, or can't be restored with this
                loader's settings.
        """
        source = self._positioned_source("restored")
        if state["num_samples"] != self.num_samples:
            msg = (
                f"The position was saved for a data set of {state['num_samples']} samples; this one has "
                f"{self.num_samples}. Load it with the same data set, or start a new epoch."
            )
            raise CheckpointError(msg)
        if isinstance(source, ShardedIterable) and (self.num_workers > 1 or self.persistent_workers):
            msg = (
                "The position of an iterable data set can't be restored with several or persistent workers, which keep "
                f"streams of their own (`num_workers={self.num_workers}`). Use `num_workers` 0 or 1, not persistent."
            )
            raise CheckpointError(msg)
        self.set_epoch(int(state["epoch"] or 0))
        self._position = source.start = int(state["position"] or 0)
        if isinstance(source, ShardedSampler) and state["seed"] is not None:
            source.seed = int(state["seed"])

    def _source(self) -> ShardedSampler | ShardedIterable | None:
        for candidate in (self.sampler, self.dataset):
            if isinstance(candidate, (ShardedSampler, ShardedIterable)):
                return candidate
        return None

    def _positioned_source(self, verb: str) -> ShardedSampler | ShardedIterable:
        source = self._source()
        if source is None:
            msg = (
                f"The position of this data loader can't be {verb}: its sampler is a `{type(self.sampler).__name__}`. "
                "Leave `distributed_sampler_cls` out, or keep the position yourself in `extra`."
            )
            raise CheckpointError(msg)
        return source

    def _own_epoch(self) -> int:
        """Return the epoch, also where it was set on the sampler, as torch's own loops do."""
        source = self._source()
        return self._epoch if source is None else source.epoch


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

    Args:
        dataset: A data set with a length, split by a `ShardedSampler`; or an iterable one, dealt out item by item.
        batch_size: Samples per batch and rank; at least 1.
        shuffle: Draw a new order each epoch; not possible for iterable data sets.
        seed: Seed of the order and of the workers; must be equal on all ranks.
        drop_last: Leave out the last batch where it would be smaller.
        pin_memory: Copy batches to pinned memory, for faster transfers to a GPU.
        num_workers: Processes that load ahead; 0 loads in this one.
        distributed_sampler_cls: Sampler of your own, constructed as
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
                f"`{name}` can't be passed here, where samples are split between ranks. Use `distributed_sampler_cls`."
            )
            raise ConfigError(msg)
    sampler: Sampler[int] | None = None
    if isinstance(dataset, IterableDataset):
        if shuffle or distributed_sampler_cls is not None:
            msg = (
                "An iterable data set has no order to shuffle or sample from. Shuffle inside the data set, by a buffer."
            )
            raise ConfigError(msg)
        dataset = ShardedIterable(dataset, rank=rank, world_size=world_size)
    elif distributed_sampler_cls is not None:
        make_sampler: Any = distributed_sampler_cls
        sampler = make_sampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
    else:
        num_samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
        sampler = ShardedSampler(
            num_samples, rank=rank, world_size=world_size, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
    return DistributedDataLoader(
        dataset,
        rank=rank,
        world_size=world_size,
        seed=seed,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **kwargs,
    )


def split_dataloader(loader: DataLoader[Any], *, rank: int, world_size: int, seed: int) -> DataLoader[Any]:
    """Return a loader like the given one whose samples are split between ranks, or the loader itself where they are.

    A plain loader would show every rank the same samples. Its batch size counts samples per rank from here on.

    Args:
        loader: The user's loader.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seed of the order; equal on all ranks.

    Raises:
        ConfigError: If the loader has a sampler of its own that does not know of ranks, and there are several.

    Collective: none.
    """
    if isinstance(loader, DistributedDataLoader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    iterable = isinstance(loader.dataset, IterableDataset)
    plain = loader.batch_size is not None and (
        iterable
        or isinstance(loader.sampler, SequentialSampler)
        or (
            isinstance(loader.sampler, RandomSampler)
            and not loader.sampler.replacement
            and len(loader.sampler) == len(loader.dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
        )
    )
    if not plain:
        if world_size == 1:
            return loader
        msg = (
            f"The data loader's `{type(loader.batch_sampler or loader.sampler).__name__}` would show each of the "
            f"{world_size} ranks the same samples. Make the loader with `plugin.prepare_dataloader`, give it a "
            "`DistributedSampler`, or leave it out of `boost` if it splits samples by rank itself."
        )
        raise ConfigError(msg)
    return prepare_dataloader(
        loader.dataset,
        loader.batch_size or 1,
        shuffle=not iterable and isinstance(loader.sampler, RandomSampler),
        seed=seed,
        drop_last=loader.drop_last,
        pin_memory=loader.pin_memory,
        num_workers=loader.num_workers,
        rank=rank,
        world_size=world_size,
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
