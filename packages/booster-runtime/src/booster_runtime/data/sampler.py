"""Which samples of an epoch a rank sees, for data sets with a length.

One global order is dealt out like cards: of each group of ``world_size`` entries every rank takes one. So the samples
of a global step are the same for any number of ranks with the same global batch, and so is a position in the global
order.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def wrap_seed(seed: int) -> int:
    """Return a seed in the range that torch's generators take: as `torch.manual_seed` does, modulo 2**64.

    Collective: none.
    """
    return seed % 2**64


class DealtOrder(Sampler[Any]):
    """An order of entries, the same on every rank, that is dealt to ranks from a position inside the epoch.

    Every rank gets equally many entries, because a rank with one step more than the others would wait for them
    forever: the end is filled up with entries from the epoch's start (padding), or cut with ``drop_last``.

    Args:
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seed of the order, equal on all ranks.
        drop_last: Leave out the entries that don't fill a group of ``world_size``.
    """

    def __init__(self, *, rank: int, world_size: int, seed: int, drop_last: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0
        # Whether `set_epoch` was called since the loader last looked.
        self.is_epoch_chosen = False
        # Tells orders apart that a user's sampler draws; None where the seed decides.
        self.digest: str | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows; a position inside another epoch is forgotten.

        Collective: none, but every rank must choose the same.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0
        self.is_epoch_chosen = True

    @property
    @abstractmethod
    def num_entries(self) -> int | None:
        """Entries of a whole epoch; ``None`` while that is not known."""

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """Length of the order as its source states it; ``None`` where it states none."""

    def generators(self) -> list[torch.Generator]:
        """Return the user's generators that decide on the order."""
        return []

    def peek(self, *, keep: bool) -> str | None:
        """Return the digest of the order that the next pass follows, and keep what was drawn for that pass."""
        del keep
        return None

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


class ShardedSampler(DealtOrder):
    """Deals the samples of a data set to ranks, in its own order or in one that is drawn for each epoch.

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

    def __init__(
        self, num_samples: int, *, rank: int, world_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        if num_samples < world_size:
            msg = (
                f"The data set has {num_samples} samples, fewer than the {world_size} ranks that see different "
                f"ones. Use at most {num_samples} ranks, or a larger data set."
            )
            raise ConfigError(msg)
        super().__init__(rank=rank, world_size=world_size, seed=seed, drop_last=drop_last)
        self._num_samples = num_samples
        self.shuffle = shuffle

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def num_entries(self) -> int:
        return self._num_samples

    def __len__(self) -> int:
        """Return how many samples of a whole epoch this rank sees, also while resuming inside one."""
        return self.per_rank(self.num_samples)

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(wrap_seed(self.seed + self.epoch))
            order = torch.randperm(self.num_samples, generator=generator)
        else:
            order = torch.arange(self.num_samples)
        remaining = order[self.start :]
        total = self.per_rank(len(remaining)) * self.world_size
        if total > len(remaining):
            remaining = torch.cat([remaining, order[: total - len(remaining)]])
        yield from remaining[self.rank : total : self.world_size].tolist()
