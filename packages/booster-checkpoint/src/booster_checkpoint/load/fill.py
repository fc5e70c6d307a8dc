"""How the shards of a load get their values, from local files or from a URL."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from booster_checkpoint.load.read_ahead import locate, read_ahead
from booster_checkpoint.load.reader import ShardReader
from booster_checkpoint.session import Progress
from booster_checkpoint.storage import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from booster_checkpoint.load.reader import ReadableTensors
    from booster_checkpoint.load.source import Source
    from booster_checkpoint.session import Session
    from booster_core.state import TensorShard


_PIECE_BYTES = 4 << 20
"""Pieces of this size begin where blocks with checksums do."""


@dataclass(frozen=True)
class Fill:
    """Fills shards from a checkpoint.

    Args:
        session: The ranks.
        call: What the user called.
        path: The checkpoint.
        source: Its files.
        named: Its tensors by the names that they go by in ``homes``.
        homes: For each tensor that is loaded, by the shards' key, its name in ``named``.
        stored: For each of them that the files hold as it is, by the shards' key, its name in ``source``.
        num_threads: How many parts of a shard are read at once.
        bucket_bytes: Most memory to use besides the shards, in bytes.
    """

    session: Session
    call: str
    path: Path
    source: Source
    named: ReadableTensors
    homes: Mapping[str, str]
    stored: Mapping[str, str]
    num_threads: int
    bucket_bytes: int

    def run(self, shards: Callable[[], Iterable[TensorShard]], *, keeps_values: bool) -> None:
        """Fill this rank's shards.

        Args:
            shards: Returns them.
            keeps_values: Whether a shard's values stay where they are when the next shard is asked for.

        Raises:
            CheckpointError: If something could not be read, on any rank.

        Collective: every rank.
        """
        metas = [self.named.tensors[key] for key in self.homes.values()]
        total_bytes = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in metas)
        what = self.call.removeprefix("load_")
        with Progress(f"Loading {what}", total_bytes, is_shown=self.session.rank == 0) as progress:
            if isinstance(self.path, RemotePath):
                self._run_at_url(shards, progress.advance, keeps_values=keeps_values)
                return
            if keeps_values and self.session.world_size > 1:
                self._take_turns(shards)
            with self.session.together(self.call, self.path, for_long=True):
                self._fill(shards(), progress.advance)

    def _take_turns(self, shards: Callable[[], Iterable[TensorShard]]) -> None:
        """Let ranks of a host that read the same, through one page cache, verify every block once between them."""
        from booster_checkpoint.load.exchange import digest_of

        session = self.session

        def look() -> str:
            return digest_of(filter(self._is_loaded, shards()), self.homes)

        told = list(zip(session.hosts(), session.gather(self.call, self.path, look), strict=True))
        mates = [rank for rank, each in enumerate(told) if each == told[session.rank]]
        self.source.take_turns(mates.index(session.rank), len(mates))

    def _run_at_url(
        self, shards: Callable[[], Iterable[TensorShard]], progress: Callable[[int], None], *, keeps_values: bool
    ) -> None:
        from booster_checkpoint.load.exchange import Exchange, digests_of, mates_by_kind

        session = self.session
        kinds: dict[str, list[TensorShard]] = {}

        def look() -> dict[str, str]:
            return digests_of(filter(self._is_loaded, shards()) if keeps_values else (), self.homes, kinds)

        told = session.gather(self.call, self.path, look)
        mates = mates_by_kind(told, session.hosts())
        is_shared = any(len(ranks) > 1 for by_kind in mates for ranks in by_kind.values())
        group = session.cpu_group() if is_shared else None
        exchanges = []
        with session.together(self.call, self.path):
            for kind, ranks in sorted(mates[session.rank].items()):
                if len(ranks) > 1:
                    exchanges.append(Exchange(self, kinds.pop(kind), ranks, progress))
        with session.together(self.call, self.path, for_long=True):
            failures = [exchange.run(group) for exchange in exchanges]
            for failure in filter(None, failures):
                raise failure
            self._fill(self._in_file_order(itertools.chain.from_iterable(kinds.values())), progress)
            if not keeps_values:
                self._fill(shards(), progress)

    def _in_file_order(self, shards: Iterable[TensorShard]) -> Iterable[TensorShard]:
        """Start to read what shards need, and return them in the order in which that arrives."""
        shards = list(shards)
        counts = Counter(shard.key for shard in shards)
        pieces = (
            piece
            for shard in shards
            # A tensor that fills several shards, as masters and their rounded copy, is fetched once.
            for piece in (self.cut(shard, self.bucket_bytes) if counts[shard.key] > 1 else (shard,))
        )
        located = locate(self.source, pieces, self.stored)
        read_ahead(located, self.bucket_bytes)
        return [each.shard for each in located]

    def _fill(self, shards: Iterable[TensorShard], progress: Callable[[int], None]) -> None:
        with self.reader(self.bucket_bytes, progress) as reader:
            for shard in filter(self._is_loaded, shards):
                reader.fill(shard, self.homes[shard.key])

    def _is_loaded(self, shard: TensorShard) -> bool:
        return shard.key in self.homes and shard.numel > 0

    def reader(self, most_bytes: int, progress: Callable[[int], None]) -> ShardReader:
        """Return a reader of the checkpoint."""
        return ShardReader(self.named, most_bytes, num_threads=self.num_threads, progress=progress)

    def stored_bytes(self, shard: TensorShard) -> int:
        """Return how many bytes of the checkpoint a shard takes."""
        return shard.numel * self.named.tensors[self.homes[shard.key]].dtype.itemsize

    def cut(self, shard: TensorShard, most_bytes: int) -> Iterator[TensorShard]:
        """Yield pieces of a shard, each at most 4 MiB and ``most_bytes`` large, there and in the checkpoint."""
        itemsize = max(shard.dtype.itemsize, self.stored_bytes(shard) // shard.numel)
        step = max(min(_PIECE_BYTES, most_bytes) // itemsize, 1)
        if shard.numel <= step or not shard.data.is_contiguous():
            yield shard
            return
        values, first = shard.data.detach().view(-1), shard.flat_range[0]
        for start in range(0, shard.numel, step):
            stop = min(start + step, shard.numel)
            yield replace(shard, flat=(first + start, first + stop), data=values[start:stop])
