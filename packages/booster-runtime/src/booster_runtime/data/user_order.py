"""Dealing what a user's own sampler or batch sampler draws, in an order that all ranks share.

The sampler runs on every rank under a seed that ranks agree on, apart from the run's own random numbers. A digest
(`booster_runtime.data.shard`) checks that ranks drew the same order: a sampler may have random numbers of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler

from booster_runtime.data.sampler import DealtOrder, wrap_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BLOCK = 1024
"""Entries drawn at a time. A digest is of the first block; a sampler may be infinite."""


class UserOrder(DealtOrder):
    """Deals the entries that a sampler draws: indices, or whole batches of a batch sampler, one to each rank in turn.

    Under a seed of the epoch, a sampler draws the same for any number of ranks, and in a resumed run. One with a
    generator of its own is decided by that.

    Args:
        sampler: The user's sampler or batch sampler, in the same state on every rank.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seeds torch's, numpy's and Python's global generators while the sampler draws; equal on all ranks.
        drop_last: Leave out the entries that don't fill a group of ``world_size``.
    """

    def __init__(self, sampler: Iterable[Any], *, rank: int, world_size: int, seed: int, drop_last: bool) -> None:
        super().__init__(rank=rank, world_size=world_size, seed=seed, drop_last=drop_last)
        self.sampler = sampler
        self._num_entries: int | None = None
        self._kept: _Draw | None = None

    @property
    def num_entries(self) -> int | None:
        """Entries of the pass whose end was seen last; a sampler's own length may be an estimate."""
        return self._num_entries

    @property
    def num_samples(self) -> int | None:
        """What the sampler says of its length, if anything."""
        try:
            return len(self.sampler)  # type: ignore[arg-type]  # a sampler need not have a length
        except (TypeError, NotImplementedError):
            return None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and tell the sampler where it has a ``set_epoch`` of its own.

        Collective: none, but every rank must choose the same.
        """
        super().set_epoch(epoch)
        inner = getattr(self.sampler, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def __len__(self) -> int:
        """Return how many entries of a whole epoch this rank gets.

        Raises:
            TypeError: If the sampler has no length.
        """
        return self.per_rank(len(self.sampler))  # type: ignore[arg-type]  # a sampler need not have a length

    def __iter__(self) -> Iterator[Any]:
        draw = self._take_draw()
        self._num_entries = None
        self.digest = draw.digest
        start, position = self.start, 0
        first: list[Any] = []  # what the end is filled up with
        group: list[Any] = []
        for entry in draw.entries():
            position += 1
            if len(first) < self.world_size:
                first.append(entry)
            if position > start:
                group.append(entry)
                if len(group) == self.world_size:
                    yield group[self.rank]
                    group = []
        self._num_entries = position
        if group and not self.drop_last:
            missing = self.rank - len(group)
            yield group[self.rank] if missing < 0 else first[missing % len(first)]

    def generators(self) -> list[torch.Generator]:
        """Return the generators that the sampler, or one inside of it, keeps as an attribute; not the global one."""
        return _generators_of(self.sampler)

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

    def _take_draw(self) -> _Draw:
        draw, self._kept = self._kept, None
        if draw is None or (draw.epoch, draw.seed) != (self.epoch, self.seed):
            draw = _Draw(self.sampler, epoch=self.epoch, seed=self.seed)
        return draw


class _Draw:
    """One pass over a sampler, drawn block by block under random numbers of its own."""

    def __init__(self, sampler: Iterable[Any], *, epoch: int, seed: int) -> None:
        self.epoch, self.seed = epoch, seed
        self._randomness = _Randomness(wrap_seed(seed * 1_000_003 + epoch))
        with self._randomness.active():
            self._iterator = iter(sampler)
        self._first = self._next_block()
        self.digest = hashlib.blake2b(repr(self._first).encode(), digest_size=16).hexdigest()

    def entries(self) -> Iterator[Any]:
        block = self._first
        while block:
            yield from block
            block = self._next_block() if len(block) == _BLOCK else []

    def _next_block(self) -> list[Any]:
        with self._randomness.active():
            # A batch sampler may go on with the list that it has yielded.
            return [list(entry) if isinstance(entry, list) else entry for entry in islice(self._iterator, _BLOCK)]


class _Randomness:
    """States of the global generators on the CPU, apart from those of the run.

    Args:
        seed: What they start from.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, Any, Any] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let global generators draw from these states, and put the run's back after it."""
        outside = _capture()
        if self._states is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)  # noqa: NPY002 - the global generator is meant
            torch.default_generator.manual_seed(self._seed)
        else:
            _restore(self._states)
        try:
            yield
        finally:
            self._states = _capture()
            _restore(outside)


def _capture() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002 - as above


def _restore(states: tuple[Any, Any, Any]) -> None:
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
