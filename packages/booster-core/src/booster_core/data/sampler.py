"""Which samples of an epoch a rank sees, for data sets with and without a length.

Both classes deal out one global order of samples like cards: of each group of ``world_size`` samples every rank takes
one. So the samples of a global step are the same for any number of ranks with the same global batch, and a position
counted in samples of the global order means the same to any number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, Sampler

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def wrap_seed(seed: int) -> int:
    """Return a seed in the range that torch's generators take: as `torch.manual_seed` does, modulo 2**64.

    Collective: none.
    """
    return seed % 2**64


class ShardedSampler(Sampler[int]):
    """Deals the samples of an epoch to ranks, from a position that may lie inside the epoch.

    The order of an epoch is that of ``torch.utils.data.DistributedSampler`` with the same seed. Every rank gets equally
    many samples: the end is filled up with samples from the epoch's start, or cut with ``drop_last``.

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
                f"The data set has {num_samples} samples, fewer than the {world_size} ranks that are to see different "
                f"ones. Use at most {num_samples} ranks, or a larger data set."
            )
            raise ConfigError(msg)
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows; a position inside another epoch is forgotten."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0

    def __len__(self) -> int:
        """Return how many samples of a whole epoch this rank sees, also while resuming inside one."""
        return self._per_rank(self.num_samples)

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(wrap_seed(self.seed + self.epoch))
            order = torch.randperm(self.num_samples, generator=generator)
        else:
            order = torch.arange(self.num_samples)
        remaining = order[self.start :]
        total = self._per_rank(len(remaining)) * self.world_size
        if total > len(remaining):
            remaining = torch.cat([remaining, order[: total - len(remaining)]])
        yield from remaining[self.rank : total : self.world_size].tolist()

    def _per_rank(self, num_samples: int) -> int:
        return num_samples // self.world_size if self.drop_last else -(-num_samples // self.world_size)


class ShardedIterable(IterableDataset[Any]):
    """Deals the items of an iterable data set to ranks; items at the end that don't fill a group are left out.

    Args:
        dataset: The whole stream, the same on every rank.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.

    A data set that splits itself between data loader workers keeps doing so: each worker's stream is dealt to ranks.
    """

    def __init__(self, dataset: IterableDataset[Any], *, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.start = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and tell the data set where it has a ``set_epoch`` of its own."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0
        inner = getattr(self.dataset, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def __iter__(self) -> Iterator[Any]:
        own: Any = None
        start = self.start  # fixed now: the loader sets it back for the next pass while this one goes on
        for index, item in enumerate(self.dataset):
            if index < start:
                continue
            turn = (index - start) % self.world_size
            if turn == self.rank:
                own = item
            # Only a full group is handed out: a rank with one batch more than the others would wait forever.
            if turn == self.world_size - 1:
                yield own
