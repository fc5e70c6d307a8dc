"""Splitting the items of an iterable data set between ranks, and telling in the loader which of them are padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks import current_world
from booster_runtime.data.order import GlobalOrder, OwnDraws
from booster_runtime.data.watches import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def check_whole(dataset: object) -> None:
    """Raise where ranks run and a data set tells that it is split between them: to split it again would lose samples.

    Those of the library ``datasets`` do, after ``split_dataset_by_node``. Mixed and packed ones have others in
    ``sources``.

    Raises:
        ConfigError: If so.
    """
    sources = getattr(dataset, "sources", None)
    for source in sources if isinstance(sources, (list, tuple)) else ():
        check_whole(source)
    for name in ("_distributed", "distributed"):
        num_shares = getattr(getattr(dataset, name, None), "world_size", None)
        if isinstance(num_shares, int) and num_shares > 1 and current_world().world_size > 1:
            msg = (
                f"The data set (`{type(dataset).__name__}`) is split between {num_shares} ranks already, and each "
                "rank's share would be split between ranks once more, so that samples are lost. Leave "
                "`split_dataset_by_node` out: pass the whole data set on every rank."
            )
            raise ConfigError(msg)


@dataclass(frozen=True)
class Padding:
    """An item that another rank has seen, given to a rank for which the end of a stream left none."""

    item: Any


class ShardedIterable(GlobalOrder, IterableDataset[Any]):
    """Splits the items of an iterable data set between ranks, which all get equally many.

    Of an incomplete group at the end, ranks without an item of their own repeat its last one, as `Padding`.

    Args:
        dataset: The whole stream, the same on every rank.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        seed: Seeds the CPU's global generators while the data set is read, so that one that shuffles yields the same
            on every rank; equal on all ranks.
        drop_last: Leave out an incomplete group instead.

    A data set that splits itself between data loader workers keeps doing so: each worker's stream is split between
    ranks.
    """

    seed: int

    def __init__(
        self, dataset: IterableDataset[Any], *, rank: int, world_size: int, seed: int, drop_last: bool = False
    ) -> None:
        super().__init__(dataset, rank=rank, world_size=world_size, seed=seed, drop_last=drop_last)
        self.dataset = dataset
        self._first: str | None = None

    @property
    def num_samples(self) -> None:
        """No length: a stream's own may be an estimate."""

    def __iter__(self) -> Iterator[Any]:
        own = item = None
        start = self.start  # fixed now: the loader sets it back for the next pass while this one goes on
        seen = 0
        worker = get_worker_info()
        for index, item in enumerate(self._alike(0 if worker is None else worker.id)):
            if index < start:
                continue
            if not seen and self.world_size > 1:
                self._first = digest_of(item, takes_plain=True)
            seen += 1
            turn = (seen - 1) % self.world_size
            if turn == self.rank:
                own = item
            # Handed out by full groups: a rank with one batch more than the others would wait forever.
            if turn == self.world_size - 1:
                yield own
        left = seen % self.world_size
        if left and not self.drop_last:
            yield own if self.rank < left else Padding(item)

    def _alike(self, worker: int) -> Iterator[Any]:
        """Yield the data set's items, drawn alike on all ranks: what is drawn between them is the rank's own."""
        draws = OwnDraws((self.seed * 1_000_003 + self.epoch) * 65_537 + worker)
        with draws:
            items = iter(self.dataset)
        while True:
            with draws:
                group = list(islice(items, self.world_size))
            if not group:
                return
            yield from group

    def take_first(self) -> str | None:
        """Return a digest of the item with which this process began its pass, once; else ``None``."""
        first, self._first = self._first, None
        return first

    def restore(self, state: Mapping[str, Any], *, num_workers: int, is_persistent: bool) -> None:
        """Check that a loader's position can be restored; the loader sets where the next pass starts.

        That of a stream of one shard, which one rank reads by shards, counts the same samples.

        Raises:
            CheckpointError: If not.
        """
        if state.get("shards", (1,))[0] != 1:
            msg = (
                "The position was saved for a stream that was read shard by shard, and this one has fewer shards than "
                f"there are ranks that see different samples ({self.world_size}). Use fewer ranks, or more files."
            )
            raise CheckpointError(msg)
        if num_workers > 1 or is_persistent:
            msg = (
                "The position of an iterable data set can't be restored with several or persistent workers, which keep "
                f"streams of their own (`num_workers={num_workers}`). Use `num_workers` 0 or 1, not persistent."
            )
            raise CheckpointError(msg)


class CountedCollate:
    """A ``collate_fn`` that returns with each batch how many samples it has, and how many of them are padding.

    What knows of padding may run in a worker process; the counts travel with the batch.

    Args:
        collate: The user's function.
        tell: Returns what else travels with the batch, told by what the samples are read from in the same process.
        is_batched: Whether it is given a list of samples; else one item.
    """

    def __init__(self, collate: Callable[[Any], Any], tell: Callable[[], Any], *, is_batched: bool) -> None:
        self._collate, self._tell = collate, tell
        self._is_batched = is_batched

    def __call__(self, given: Any) -> tuple[int | None, int, Any, Any]:
        if not self._is_batched:  # the item may be a batch of any number of samples
            is_padding = isinstance(given, Padding)
            return None, int(is_padding), self._collate(given.item if is_padding else given), self._tell()
        samples = [sample.item if isinstance(sample, Padding) else sample for sample in given]
        num_padded = sum(isinstance(sample, Padding) for sample in given)
        return len(samples), num_padded, self._collate(samples), self._tell()
