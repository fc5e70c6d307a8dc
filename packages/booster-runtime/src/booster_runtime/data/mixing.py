"""Several streams and data sets read as one, each as often as its weight says."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset

from booster_core.errors import CheckpointError, ConfigError
from booster_runtime.data.order import wrap_seed
from booster_runtime.data.streams import num_shards_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SHARDS = 64
"""Shards that a data set with a length is cut into, so that as many ranks and workers can read their own."""
_BLOCK = 1024
"""Draws made together: a position inside of a block is found by drawing it again."""
_END = object()


class MixedStreams(IterableDataset[Any]):
    """Samples of several sources, for a data loader that `boost` splits between ranks, or for `PackedDocuments`.

    Each sample's source is drawn by ``seed``, the epoch and the sample's number, so that a run goes on exactly: a
    position has that number and the position of each source. Shards are mixed each by itself.

    Example::

        MixedStreams([(web, 0.7), (code, 0.3)], seed=7, at_end="repeat")

    Args:
        sources: Each with its weight: a stream, split and restored by its own ``shard``, ``num_shards`` and
            ``state_dict`` where it has them, or a data set with a length, which is reshuffled in each epoch. There
            are as many shards as the source with the fewest has.
        seed: Of the draws and of the order of data sets; equal on all ranks.
        at_end: What comes after the end of a source: ``"stop"`` ends the pass, ``"repeat"`` begins the source again,
            in its next epoch, until every source has come to its end once.

    Raises:
        ConfigError: If there are no sources, a weight is not positive, or ``at_end`` is something else; while
            iterating, if a source that is repeated is empty.
    """

    def __init__(
        self, sources: Sequence[tuple[Any, float]], *, seed: int, at_end: Literal["stop", "repeat"] = "stop"
    ) -> None:
        super().__init__()
        self.weights = [float(weight) for _, weight in sources]
        if not sources or not all(weight > 0 and math.isfinite(weight) for weight in self.weights):
            msg = f"Each source has a positive weight, such as `[(web, 0.7), (code, 0.3)]`; got {self.weights}."
            raise ConfigError(msg)
        if at_end not in ("stop", "repeat"):
            msg = f"`at_end={at_end!r}` is no way to go on after the end of a source. Use 'stop' or 'repeat'."
            raise ConfigError(msg)
        self.sources = [
            _ShuffledDataset(source, seed=seed, number=number) if _has_length(source) else source
            for number, (source, _) in enumerate(sources)
        ]
        self._seed, self._at_end = seed, at_end
        self._place = (1, 0)
        self._epoch = self._num_drawn = 0
        self._loaded: Mapping[str, Any] | None = None
        # Of each source how often it has ended, and how many samples it gave since.
        self._passes = [0] * len(sources)
        self._num_seen = [0] * len(sources)
        # Positions that were loaded, of sources that gave nothing since.
        self._positions: list[Any] = [None] * len(sources)

    @property
    def num_shards(self) -> int:
        """Number of shards: as many as the source with the fewest has; 1 where one can't be split."""
        return min(num_shards_of(source) or 1 for source in self.sources)

    def shard(self, num_shards: int, index: int) -> MixedStreams:
        """Return the mixture of one shard of each source."""
        parts = [source.shard(num_shards=num_shards, index=index) for source in self.sources]
        mixed = MixedStreams(list(zip(parts, self.weights, strict=True)), seed=self._seed, at_end=self._at_end)
        mixed._place = (num_shards, index)
        return mixed

    def set_epoch(self, epoch: int) -> None:
        """Choose the draws, and the epoch that the sources begin with."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return how many samples were drawn, and the position of each source."""
        if self._loaded is not None:  # no pass has begun since
            return dict(self._loaded)
        positions = [
            known if known is not None or not seen else _position(source)
            for source, known, seen in zip(self.sources, self._positions, self._num_seen, strict=True)
        ]
        columns = zip(self._passes, self._num_seen, positions, strict=True)
        names = ("passes", "num_seen", "position")
        sources = [dict(zip(names, each, strict=True)) for each in columns]
        return {"num_drawn": self._num_drawn, "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from there; a source that can't tell its position is read again.

        Raises:
            CheckpointError: If there were more or fewer sources. Other weights count from here on.
        """
        if len(state["sources"]) != len(self.sources):
            msg = (
                f"The position was saved for a mixture of {len(state['sources'])} sources; this one has "
                f"{len(self.sources)}. Load it with the same sources, in their order, or start a new epoch."
            )
            raise CheckpointError(msg)
        self._loaded = state

    def __iter__(self) -> Iterator[Any]:
        state, self._loaded = self._loaded or {}, None
        self._num_drawn = state.get("num_drawn", 0)
        known: Sequence[Mapping[str, Any]] = state.get("sources") or [{}] * len(self.sources)
        self._passes = [each.get("passes", 0) for each in known]
        self._num_seen = [each.get("num_seen", 0) for each in known]
        self._positions = [each.get("position") for each in known]
        readers = [self._reader(number) for number in range(len(known))]
        for number in self._draws(self._num_drawn):
            item = next(readers[number], _END)
            self._positions[number] = None
            if item is _END:
                self._passes[number] += 1
                if self._at_end == "stop" or all(self._passes):
                    return
                self._num_seen[number] = 0
                readers[number] = self._reader(number)
                item = next(readers[number], _END)
                if item is _END:
                    kind = type(self.sources[number]).__name__
                    msg = f"Source {number} of the mixture (`{kind}`) has no samples to repeat. Leave it out."
                    raise ConfigError(msg)
            self._num_seen[number] += 1
            self._num_drawn += 1
            yield item

    def _draws(self, start: int) -> Iterator[int]:
        """Yield the sources of the samples from a number on."""
        bounds = np.cumsum(self.weights)[:-1] / sum(self.weights)
        for block in itertools.count(start // _BLOCK):
            generator = np.random.default_rng([wrap_seed(self._seed), self._epoch, *self._place, block])
            drawn = np.searchsorted(bounds, generator.random(_BLOCK), side="right").tolist()
            yield from drawn[max(start - block * _BLOCK, 0) :]

    def _reader(self, number: int) -> Iterator[Any]:
        """Return what is left of a source's pass, from its position, or after the samples that it has given."""
        source, position = self.sources[number], self._positions[number]
        set_epoch = getattr(source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch + self._passes[number])
        if position is not None:
            source.load_state_dict(position)
        return itertools.islice(source, 0 if position is not None else self._num_seen[number], None)


class _ShuffledDataset:
    """A data set with a length as a stream: each epoch in an order of its own, cut into shards."""

    def __init__(self, dataset: Any, *, seed: int, number: int) -> None:
        self._dataset, self._seed, self._number = dataset, seed, number
        self._place = (1, 0)
        self._epoch = self._next = self._start = 0

    @property
    def num_shards(self) -> int:
        """Number of shards that it can be cut into, each with a sample."""
        return max(min(_SHARDS, len(self._dataset)), 1)

    def shard(self, num_shards: int, index: int) -> _ShuffledDataset:
        """Return one of every so many samples of the order."""
        part = _ShuffledDataset(self._dataset, seed=self._seed, number=self._number)
        part._place = (num_shards, index)
        return part

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return how many samples of the order were read."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass begin there."""
        self._start = self._next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        start, self._start, self._next = self._start, 0, self._start
        (drawn,) = np.random.SeedSequence([wrap_seed(self._seed), self._number, self._epoch]).generate_state(1).tolist()
        order = torch.randperm(len(self._dataset), generator=torch.Generator().manual_seed(drawn))
        num_shards, index = self._place
        for self._next, sample in enumerate(order[index::num_shards][start:].numpy(), start + 1):
            yield self._dataset[int(sample)]


def _has_length(source: Any) -> bool:
    is_stream = isinstance(source, (IterableDataset, _ShuffledDataset))
    return not is_stream and all(hasattr(source, name) for name in ("__len__", "__getitem__"))


def _position(source: Any) -> Any:
    own = getattr(source, "state_dict", None)
    return own() if callable(own) and callable(getattr(source, "load_state_dict", None)) else None
