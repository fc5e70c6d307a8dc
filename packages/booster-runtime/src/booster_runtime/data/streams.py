"""Streams that can be read shard by shard, such as those of the library ``datasets``: each rank reads its own shards.

A shard's position is a state of its own, so that a run goes on with another number of ranks or workers. Positions are
made where samples are read, which may be a worker process, and travel with the batch: what was prefetched and not
handed out does not count.

Shards have different lengths, and a rank with a batch more than the others would wait for them forever: ranks agree on
each batch, and one that has none gets another rank's.
"""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING, Any

from torch.utils.data import _utils as loader_utils
from torch.utils.data import get_worker_info

from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks import DistCoordinator
from booster_runtime.data.iterable import ShardedIterable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import IterableDataset

_END = object()
_MEETING = "next batch of a stream"


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
        seed: Of the loader; what a rank draws while it reads its own shards is its own.
        drop_last: End with the first rank that runs out. Else those get batches of ranks that still have some, as
            padding, until the last one has run out.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        num_shards: int,
        rank: int,
        world_size: int,
        seed: int,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, rank=rank, world_size=world_size, seed=seed, drop_last=drop_last)
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

    def shared_out(self, batches: Iterator[Any]) -> Iterator[tuple[int | None, int, Any, Any]]:
        """Yield equally many batches on every rank, with the positions that they reach, for `hand_out`.

        Args:
            batches: What `CountedCollate` made of this rank's samples.

        Raises:
            ConfigError: If a rank's shards are empty, so that with ``drop_last`` no rank would get a batch.
            Exception: What reading has raised, on every rank.

        Collective: every rank of the world, at each batch.
        """
        is_fresh = not self._starts
        self._reached = dict(self._starts)
        for number in itertools.count():
            error: Exception | None = None
            batch: Any = _END
            try:
                batch = next(batches, _END)
            except Exception as caught:  # noqa: BLE001 - raised by `_lenders`, on every rank
                error = caught
            self._starts = {}  # the next pass begins at the start, also where this one is left early
            lenders = self._lenders(number, is_left=batch is not _END, is_first=is_fresh and number == 0, error=error)
            if lenders is None:
                return
            lent = self._lend(lenders, batch)
            if batch is not _END:
                yield batch
                continue
            num_samples, given = lent
            yield num_samples, 1 if num_samples is None else num_samples, given, {}

    def hand_out(self, reached: Mapping[str, dict[str, Any]]) -> None:
        """Note the positions that a batch reaches which is handed out now."""
        self._reached |= reached

    def _lenders(self, number: int, *, is_left: bool, is_first: bool, error: Exception | None) -> dict[int, int] | None:
        """Return for each index without a batch the world rank that lends its own; ``None`` where the pass has ended.

        Lenders take turns from batch to batch, so that no rank's samples are copied more often than others'.

        Collective: every rank of the world. Raises on all of them what one raised.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return {} if is_left else None
        coordinator = DistCoordinator()
        ranks = coordinator.all_gather_object((self.rank, is_left, error is not None), name=_MEETING)
        # One world rank of each index: those that share samples have the same batches.
        owners = {index: (rank, has_batch) for rank, (index, has_batch, _) in reversed(list(enumerate(ranks)))}
        able = [rank for _, (rank, has_batch) in sorted(owners.items()) if has_batch]
        ended = [index for index, (_, has_batch) in sorted(owners.items()) if not has_batch]
        is_dropped = self.drop_last and bool(ended)
        if any(has_failed for *_, has_failed in ranks) or (is_dropped and is_first and able):
            with coordinator.together(_MEETING):
                if error is not None:
                    raise error
                if not is_left:
                    msg = (
                        f"Rank {self.rank} has no batch at all: its shards are empty, and with `drop_last=True` an "
                        "epoch ends with the first rank that runs out. Use fewer ranks, or leave `drop_last` out."
                    )
                    raise ConfigError(msg)
        if is_dropped or not able:
            return None
        return {index: able[(number + turn) % len(able)] for turn, index in enumerate(ended)}

    def _lend(self, lenders: Mapping[int, int], batch: Any) -> Any:
        """Return the lent batch, with the number of its samples, on ranks that have none of their own; else ``None``.

        Collective: every rank of the world. Raises on all of them where a batch can't be pickled.
        """
        coordinator = DistCoordinator()
        own = None
        for lender in sorted(set(lenders.values())):
            sent = _pickled(batch[0], batch[2]) if coordinator.rank == lender else None
            sent = coordinator.broadcast_object(sent, lender, name=_MEETING, meets=False)
            if isinstance(sent, ConfigError):
                raise sent
            if lenders.get(self.rank) == lender:
                own = pickle.loads(sent)  # noqa: S301 - from another rank of this run
        return own

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
        if num_shards is None and self.num_shards == 1:  # more ranks took turns in reading it
            num_seen = state["position"] or 0
            num_shards, positions = 1, {"0": {"num_seen": num_seen, "position": None}} if num_seen else {}
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


def _pickled(num_samples: int | None, batch: Any) -> bytes | ConfigError:
    try:
        return pickle.dumps((num_samples, batch))
    except Exception as error:  # noqa: BLE001 - raised by `_lend`, on every rank
        return ConfigError(
            "Some ranks' shards have ended, and a batch can't be copied to them, as it can't be pickled "
            f"({type(error).__name__}: {error}). Pass `drop_last=True`, or return tensors from `collate_fn`."
        )


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
