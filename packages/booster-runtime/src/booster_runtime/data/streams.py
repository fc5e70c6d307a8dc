"""Streams that can be read shard by shard, such as those of the library ``datasets``: each rank reads its own shards.

A shard's position is a state of its own, so that a run goes on with another number of ranks or workers. Positions are
made where samples are read, which may be a worker process, and travel with the batch: what was prefetched and not
handed out does not count.

Shards have different lengths, and a rank with a batch more than the others would wait for them forever: ranks agree on
each batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import _utils as loader_utils
from torch.utils.data import get_worker_info

from booster_core.errors import CheckpointError, ConfigError
from booster_core.log import log
from booster_core.ranks import DistCoordinator
from booster_runtime.data.iterable import ShardedIterable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import IterableDataset

_END = object()
_MEETING = "next batch of a stream"
_MANY = 2
"""Repeated batches after which a rank says so."""


def num_shards_of(dataset: Any) -> int | None:
    """Return how many shards a stream can be read by; ``None`` where it can't be."""
    if callable(getattr(dataset, "shard", None)):
        for name in ("num_shards", "n_shards"):
            found = getattr(dataset, name, None)
            if isinstance(found, int) and found > 0:
                return found
    can_resume = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    return 1 if can_resume else None


class StreamShards(ShardedIterable):
    """Splits the shards of a stream between ranks, and those of a rank between its workers, in turn.

    Args:
        dataset: The whole stream, the same on every rank, with ``shard(num_shards, index)`` and ``num_shards`` as in
            ``datasets``, or with ``state_dict`` and ``load_state_dict`` alone, which is one shard.
        num_shards: What `num_shards_of` returned; at least ``world_size``.
        rank: Index of this rank among the ranks that see different samples.
        world_size: Number of these ranks.
        drop_last: End with the first rank that runs out. Else those repeat their last batch, as padding, until the last
            one has run out.
    """

    def __init__(
        self, dataset: IterableDataset[Any], *, num_shards: int, rank: int, world_size: int, drop_last: bool = False
    ) -> None:
        super().__init__(dataset, rank=rank, world_size=world_size, drop_last=drop_last)
        self.num_shards = num_shards
        # Positions by shard: those from which the next pass starts, and those of what was handed out.
        self._starts: dict[str, dict[str, Any]] = {}
        self._reached: dict[str, dict[str, Any]] = {}
        # Of the process that reads: the shards that have ended since it was last asked, and the one being read.
        self._ended: list[str] = []
        self._current: tuple[str, Any, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        # What is left of a pass that was not read to its end.
        starts, self._ended, self._current = self._starts, [], None
        worker = get_worker_info()
        own = range(self.rank, self.num_shards, self.world_size)
        for index in own if worker is None else own[worker.id :: worker.num_workers]:
            key, start = str(index), starts.get(str(index), {})
            if start.get("is_ended"):
                continue
            shard: Any = self._shard(index)
            num_seen, position = start.get("num_seen", 0), start.get("position")
            if position is not None:
                shard.load_state_dict(position)
            items = _alone(iter(shard))
            if position is None:
                for _ in range(num_seen):  # a shard that can't tell its position is read again
                    next(items, None)
            for item in items:
                num_seen += 1
                self._current = key, shard, num_seen
                yield item
            self._current = None
            self._ended.append(key)

    def _shard(self, index: int) -> Any:
        dataset: Any = self.dataset
        shard = dataset if self.num_shards == 1 else dataset.shard(num_shards=self.num_shards, index=index)
        set_epoch = getattr(shard, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        return shard

    def progress(self) -> dict[str, dict[str, Any]]:
        """Return the positions of the shards that this process has read from since it was last asked."""
        reached: dict[str, dict[str, Any]] = {key: {"is_ended": True} for key in self._ended}
        self._ended.clear()
        if self._current is not None:
            key, shard, num_seen = self._current
            state = shard.state_dict() if callable(getattr(shard, "state_dict", None)) else None
            reached[key] = {"num_seen": num_seen, "position": state}
        return reached

    def handed_out(self, batches: Iterator[Any]) -> Iterator[tuple[int | None, int, Any]]:
        """Yield equally many batches on every rank, and note the positions that they reach.

        Args:
            batches: What `CountedCollate` made of this rank's samples.

        Raises:
            ConfigError: If a rank has no batch at all and others do.
            Exception: What reading has raised, on every rank.

        Collective: every rank of the world, at each batch.
        """
        last: Any = None
        num_repeated = 0
        self._reached = dict(self._starts)
        while True:
            error: Exception | None = None
            batch = _END
            try:
                batch = next(batches, _END)
            except Exception as caught:  # noqa: BLE001 - raised by `_agreed`, on every rank
                error = caught
            self._starts = {}  # the next pass begins at the start, also where this one is left early
            if not self._agreed(is_left=batch is not _END, is_empty=batch is _END and last is None, error=error):
                return
            if batch is not _END:
                last = batch
                num_samples, num_padded, given, reached = last
                self._reached |= reached
                yield num_samples, num_padded, given
                continue
            num_repeated += 1
            if num_repeated == _MANY:
                log.warning(
                    "The shards of rank %d have ended, and it repeats its last batch until those of the other ranks "
                    "end. Pass `drop_last=True`, or make shards of equal lengths.",
                    self.rank,
                )
            num_samples, _, given, _ = last
            yield num_samples, 1 if num_samples is None else num_samples, given

    def _agreed(self, *, is_left: bool, is_empty: bool, error: Exception | None) -> bool:
        """Return whether there is one more batch for all ranks; raise on all of them what one raised.

        Collective: every rank of the world.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return is_left
        coordinator = DistCoordinator()
        ranks = coordinator.all_gather_object((is_left, is_empty, error is not None), name=_MEETING)
        are_left, are_empty, have_failed = zip(*ranks, strict=True)
        if any(have_failed) or (any(are_left) and any(are_empty)):
            with coordinator.together(_MEETING):
                if error is not None:
                    raise error
                if is_empty:
                    msg = f"Rank {self.rank} has no batch at all: its shards are empty. Use fewer ranks."
                    raise ConfigError(msg)
        return all(are_left) if self.drop_last else any(are_left)

    def gathered_positions(self) -> dict[str, dict[str, Any]]:
        """Return the positions of the shards of all ranks.

        Collective: every rank of the world.
        """
        merged = dict(self._reached)
        if self.world_size > 1:
            for other in DistCoordinator().all_gather_object(merged, name="positions of a stream"):
                merged |= {key: reached for key, reached in other.items() if self._is_further(reached, merged.get(key))}
        return dict(sorted(merged.items()))

    @staticmethod
    def _is_further(reached: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
        if known is None or reached.get("is_ended"):
            return True
        return not known.get("is_ended") and reached["num_seen"] > known["num_seen"]

    def restore(self, state: Mapping[str, Any], *, num_workers: int, is_persistent: bool) -> None:
        """Start the next pass where a run with any number of ranks and workers stood.

        Raises:
            CheckpointError: If the stream has another number of shards, was not read by shards, or workers persist.
        """
        del num_workers
        num_shards, positions = state.get("shards", (None, {}))
        if num_shards != self.num_shards:
            was = "that was not read by shards" if num_shards is None else f"of {num_shards} shards"
            msg = (
                f"The position was saved for a stream {was}; this one has {self.num_shards}. Load it with the same "
                "files, or start a new epoch."
            )
            raise CheckpointError(msg)
        if is_persistent and positions:
            msg = "Persistent workers keep streams of their own, so that no position can be restored. Leave them out."
            raise CheckpointError(msg)
        self._starts = self._reached = dict(positions)


def _alone(items: Iterator[Any]) -> Iterator[Any]:
    """Yield items as in a process without workers: a shard that split itself between these would lose samples."""
    worker = loader_utils.worker
    while True:
        known, worker._worker_info = worker._worker_info, None  # noqa: SLF001 - what `get_worker_info` returns
        try:
            item = next(items, _END)
        finally:
            worker._worker_info = known  # noqa: SLF001
        if item is _END:
            return
        yield item
