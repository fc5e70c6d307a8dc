"""Which samples of an epoch each rank gets, in one global order.

Of each group of ``world_size`` entries every rank gets one. So the samples of a global step are the same for any number
of ranks with the same global batch, and so is a position in the global order.

A user's own sampler runs on every rank under a seed that ranks agree on, apart from the run's own random numbers. A
digest (`booster_runtime.data.shard`) checks that ranks drew the same order: a sampler may have random numbers of its
own.
"""

from __future__ import annotations

import hashlib
import random
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BLOCK = 1024
"""Entries drawn at a time. A digest is of the first block, and saved with positions; a sampler may be infinite."""


def wrap_seed(seed: int) -> int:
    """Return a seed in the range that torch's generators take: as `torch.manual_seed` does, modulo 2**64."""
    return seed % 2**64


class GlobalOrder:
    """An order of entries, the same on every rank, that is split between ranks from a position inside the epoch.

    Every rank gets equally many entries, because a rank with one step more than the others would wait for them
    forever: the end is filled up with entries from the epoch's start (padding), or cut with ``drop_last``.

    Args:
        source: What the order is drawn from.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        drop_last: Leave out the entries that don't fill a group of ``world_size``.
        seed: Seed of the order, equal on all ranks; ``None`` where no seed decides on it.
    """

    def __init__(self, source: Any, *, rank: int, world_size: int, drop_last: bool, seed: int | None = None) -> None:
        self.source = source
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0
        self.start = 0
        # Whether `set_epoch` was called since the loader last looked.
        self.is_epoch_chosen = False
        # Tells orders apart that a user's sampler draws; None where the seed decides.
        self.digest: str | None = None
        # Entries of a whole epoch; None while that is not known.
        self.num_entries: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration follows; a position inside another epoch is forgotten.

        The source is told, where it has a ``set_epoch`` of its own.

        Collective: none, but every rank must choose the same.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0
        self.is_epoch_chosen = True
        inner = getattr(self.source, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    @property
    def num_samples(self) -> int | None:
        """Length of the order as its source states it; ``None`` where it states none."""
        try:
            return len(self.source)
        except (TypeError, NotImplementedError):
            return None

    def generators(self) -> list[torch.Generator]:
        """Return the user's generators that decide on the order."""
        return []

    def peek(self, *, keep: bool) -> str | None:
        """Return the digest of the order that the next pass follows, and keep what was drawn for that pass."""
        del keep
        return None

    def blocks(self) -> Iterator[list[Any]]:
        """Yield the whole epoch's entries, some at a time."""
        raise NotImplementedError

    def per_rank(self, num_entries: int) -> int:
        """Return how many of ``num_entries`` entries each rank gets."""
        return num_entries // self.world_size if self.drop_last else -(-num_entries // self.world_size)

    def shares(self, start: int) -> tuple[int, int] | None:
        """Return how many entries this rank gets of a pass from ``start`` on, and how many of them are no padding.

        ``None`` while the order's end has not been seen; padding is at the end only.
        """
        if self.num_entries is None:
            return None
        left = max(self.num_entries - start, 0)
        total = self.per_rank(left)
        return total, min(total, len(range(self.rank, left, self.world_size)))

    def __len__(self) -> int:
        """Return how many entries of a whole epoch this rank gets, also while resuming inside one.

        Raises:
            TypeError: If the source has no length.
        """
        return self.per_rank(len(self.source))

    def __iter__(self) -> Iterator[Any]:
        start, position = self.start, 0
        first: list[Any] = []  # what the end is filled up with
        group: list[Any] = []
        for block in self.blocks():
            first += block[: self.world_size - len(first)]
            group += block[max(start - position, 0) :]
            position += len(block)
            num_whole = len(group) - len(group) % self.world_size
            yield from group[self.rank : num_whole : self.world_size]
            group = group[num_whole:]
        self.num_entries = position
        if group and not self.drop_last:
            missing = self.rank - len(group)
            yield group[self.rank] if missing < 0 else first[missing % len(first)]


class ShardedSampler(GlobalOrder, Sampler[int]):
    """Splits the samples of a data set between ranks, in its own order or in one that is drawn for each epoch.

    The order of an epoch is that of ``torch.utils.data.DistributedSampler`` with the same seed.

    Args:
        num_samples: Samples in the data set.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        shuffle: Draw a new order each epoch.
        seed: Seed of the order, equal on all ranks.
        drop_last: Leave out the samples that don't fill a group of ``world_size``.

    Raises:
        ConfigError: If the data set has fewer samples than there are ranks.
    """

    seed: int

    def __init__(
        self, num_samples: int, *, rank: int, world_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        if num_samples < world_size:
            msg = (
                f"The data set has {num_samples} samples, fewer than the {world_size} ranks that see different "
                f"ones. Use at most {num_samples} ranks, or a larger data set."
            )
            raise ConfigError(msg)
        super().__init__(range(num_samples), rank=rank, world_size=world_size, drop_last=drop_last, seed=seed)
        self.num_entries = num_samples
        self.shuffle = shuffle

    def blocks(self) -> Iterator[list[int]]:
        num_samples = len(self.source)
        if self.shuffle:
            generator = torch.Generator().manual_seed(wrap_seed(self.seed + self.epoch))
            order = torch.randperm(num_samples, generator=generator)
        else:
            order = torch.arange(num_samples)
        for first in range(0, num_samples, _BLOCK):
            yield order[first : first + _BLOCK].tolist()


class UserOrder(GlobalOrder, Sampler[Any]):
    """Splits the entries that a sampler draws: indices, or whole batches of a batch sampler, one to each rank in turn.

    Under a seed of the epoch, a sampler draws the same for any number of ranks, and in a resumed run. One with a
    generator of its own is decided by that. The number of entries is that of the last whole pass, since a sampler's own
    length may be an estimate.

    Args:
        sampler: The user's sampler or batch sampler, in the same state on every rank.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seeds torch's, numpy's and Python's global generators while the sampler draws; equal on all ranks.
        drop_last: Leave out the entries that don't fill a group of ``world_size``.
    """

    seed: int

    def __init__(self, sampler: Iterable[Any], *, rank: int, world_size: int, seed: int, drop_last: bool) -> None:
        super().__init__(sampler, rank=rank, world_size=world_size, drop_last=drop_last, seed=seed)
        self._kept: Draw | None = None

    def blocks(self) -> Iterator[list[Any]]:
        draw = self._take_draw()
        self.num_entries = None
        self.digest = draw.digest
        yield from draw.blocks()

    def generators(self) -> list[torch.Generator]:
        """Return the generators that the sampler, or one inside of it, keeps as an attribute; not the global one."""
        return _generators_of(self.source)

    def peek(self, *, keep: bool) -> str:
        """Return a digest of the order that the next pass will draw.

        Args:
            keep: The next pass goes on with what was drawn for this; needed where the sampler has a state that
                drawing changes, and that can't be set back.
        """
        draw = self._take_draw()
        if keep:
            self._kept = draw
        self.digest = draw.digest
        return draw.digest

    def _take_draw(self) -> Draw:
        draw, self._kept = self._kept, None
        if draw is None or (draw.epoch, draw.seed) != (self.epoch, self.seed):
            draw = Draw(self.source, epoch=self.epoch, seed=self.seed)
        return draw


class Draw:
    """One pass over a sampler, drawn block by block under random numbers of its own."""

    def __init__(self, sampler: Iterable[Any], *, epoch: int, seed: int) -> None:
        self.epoch, self.seed = epoch, seed
        self._draws = OwnDraws(seed * 1_000_003 + epoch)
        with self._draws:
            self._iterator = iter(sampler)
        self._first = self._next_block()
        self.digest = hashlib.blake2b(repr(self._first).encode(), digest_size=16).hexdigest()

    def blocks(self) -> Iterator[list[Any]]:
        """Yield the entries, some at a time."""
        block = self._first
        while block:
            yield block
            block = self._next_block() if len(block) == _BLOCK else []

    def _next_block(self) -> list[Any]:
        with self._draws:
            # A batch sampler may go on with the list that it has yielded.
            return [list(entry) if isinstance(entry, list) else entry for entry in islice(self._iterator, _BLOCK)]


class OwnDraws:
    """A context in which the CPU's global generators draw from a stream of its own, each time further on.

    Args:
        start: Seed of the stream, or the states that `host_draws` returned elsewhere; ranks that pass the same one draw
            alike.
    """

    def __init__(self, start: int | tuple[Any, Any, Any]) -> None:
        if isinstance(start, int):
            seed = wrap_seed(start)
            start = (
                random.Random(seed).getstate(),  # noqa: S311 - no secrets
                np.random.RandomState(seed % 2**32).get_state(),
                torch.Generator().manual_seed(seed).get_state(),
            )
        self._states = start

    def __enter__(self) -> None:
        self._outside = host_draws()
        restore_host_draws(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = host_draws()
        restore_host_draws(self._outside)


def host_draws() -> tuple[Any, Any, Any]:
    """Return the states of the CPU's global generators: Python's, NumPy's and torch's."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002 - the global generator is meant


def restore_host_draws(states: tuple[Any, Any, Any]) -> None:
    """Set them to what `host_draws` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002 - as above
    torch.default_generator.set_state(states[2])


def _generators_of(sampler: Any) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for value in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
        if isinstance(value, torch.Generator) and value is not torch.default_generator:
            found.append(value)
        elif isinstance(value, Sampler):
            found += _generators_of(value)
    return found
