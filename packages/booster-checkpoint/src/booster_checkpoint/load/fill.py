"""How the shards of a load get their values: what each needs, and nothing else, is read into its memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from booster_checkpoint.save.fragments import DeviceCopies, host_buffer
from booster_checkpoint.session import timed
from booster_checkpoint.storage.stored_file import ReadAhead, StoredFile
from booster_core.state import Region, TensorShard, regions_of, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from booster_checkpoint.load.source import Source
    from booster_checkpoint.session import Session
    from booster_checkpoint.storage import Location
    from booster_core.state import Box, TensorMeta

_PIECE_BYTES = 4 << 20
"""Pieces of this size begin where blocks with checksums do."""
_MIN_THREAD_BYTES = 1 << 20
"""Parts smaller than this are not worth a thread."""


@dataclass(frozen=True)
class ShardLoader:
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
    path: Location
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
        with timed(self.call, self.path, total_bytes):
            if keeps_values and not self.path.is_cached_by_host:
                shards = functools.partial(self._in_file_order, shards)
            with self.session.together(self.call, self.path, for_long=True, nbytes=total_bytes):
                self._fill(shards())

    def _in_file_order(self, shards: Callable[[], Iterable[TensorShard]]) -> Iterator[TensorShard]:
        """Start to read what this rank needs from a URL, and yield its shards in the order in which that arrives."""
        loaded = list(filter(self._is_loaded, shards()))
        counts = Counter(shard.key for shard in loaded)
        files: dict[int, int] = {}
        placed: list[tuple[int, int, list[tuple[StoredFile, int, int]], TensorShard]] = []
        others = []
        for shard in loaded:
            # A tensor that fills several shards, as masters and their rounded copy, is fetched once.
            for piece in self._cut(shard) if counts[shard.key] > 1 else (shard,):
                ranges = self._ranges_of(piece)
                if ranges:
                    place = files.setdefault(id(ranges[0][0]), len(files))
                    placed.append((place, ranges[0][1], ranges, piece))
                else:
                    others.append(piece)
        placed.sort(key=lambda entry: entry[:2])
        ReadAhead((each for *_, ranges, _ in placed for each in ranges), self.bucket_bytes)
        yield from (piece for *_, piece in placed)
        yield from others

    def _ranges_of(self, shard: TensorShard) -> list[tuple[StoredFile, int, int]]:
        """Return the ranges of files at a URL that fill a shard, in the order in which they are read; none if unknown.

        They are known of a tensor that files hold as it is.
        """
        key = self.stored.get(shard.key)
        place = None if key is None else self.source.place_of(key)
        if key is None or place is None:
            return []
        (content, offset), meta = place, self.source.tensors[key]
        assert isinstance(content.file, StoredFile), "at a URL"
        return [
            (content.file, start, stop)
            for region in regions_of(shard.box, shard.flat)
            for start, stop in content.ranges_of(offset, meta.shape, meta.dtype.itemsize, region.box)
        ]

    def _cut(self, shard: TensorShard) -> Iterator[TensorShard]:
        """Yield pieces of a shard, each at most 4 MiB and a bucket large, there and in the checkpoint."""
        itemsize = max(shard.dtype.itemsize, self.named.tensors[self.homes[shard.key]].dtype.itemsize)
        step = max(min(_PIECE_BYTES, self.bucket_bytes) // itemsize, 1)
        if shard.numel <= step or not shard.data.is_contiguous():
            yield shard
            return
        values, first = shard.data.detach().view(-1), shard.flat_range[0]
        for start in range(0, shard.numel, step):
            stop = min(start + step, shard.numel)
            yield replace(shard, flat=(first + start, first + stop), data=values[start:stop])

    def _fill(self, shards: Iterable[TensorShard]) -> None:
        with ShardReader(self.named, self.bucket_bytes, num_threads=self.num_threads) as reader:
            for shard in filter(self._is_loaded, shards):
                reader.fill(shard, self.homes[shard.key])

    def _is_loaded(self, shard: TensorShard) -> bool:
        return shard.key in self.homes and shard.numel > 0


class ReadableTensors(Protocol):
    """Something that tensors can be read from in parts."""

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """What the tensors are, by name."""

    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor; see `booster_checkpoint.files.tensor_file.TensorFile.read`."""


class ShardReader:
    """Fills shards. A context manager, which owns its threads.

    Values go straight into memory where dtype, device and layout allow it; otherwise they travel through at most one
    bucket.

    Args:
        source: The checkpoint.
        bucket_bytes: Most memory to use besides the shards' own, in bytes.
        num_threads: How many parts of a shard are read at once.
    """

    def __init__(
        self,
        source: ReadableTensors,
        bucket_bytes: int,
        *,
        num_threads: int = 1,
    ) -> None:
        self._source = source
        self._stage_bytes = max(bucket_bytes // (2 * num_threads), 16)
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "checkpoint reader") if num_threads > 1 else None
        self._stages: deque[tuple[torch.Tensor, DeviceCopies]] = deque()
        self._unused = itertools.repeat(None, 2 * num_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for _, copies in self._stages:
            copies.wait()
        self._stages.clear()

    def fill(self, shard: TensorShard, key: str) -> None:
        """Read a shard's values from the checkpoint's tensor ``key``, which has the shard's global shape."""
        meta = self._source.tensors[key]
        data = shard.data.detach()
        is_direct = data.device.type == "cpu" and data.dtype == meta.dtype and data.is_contiguous()
        fill = self._fill_directly if is_direct else self._fill_through_stage
        parts = self._cut(regions_of(shard.box, shard.flat), meta.dtype.itemsize, is_direct=is_direct)
        if self._pool is None or len(parts) == 1:
            for part in parts:
                fill(key, meta, data, part)
        else:
            stream = None if data.device.type == "cpu" else torch.accelerator.current_stream(data.device)

            def fill_in_stream(part: Region) -> None:
                if stream is not None:  # a thread's own one, of the first device, is ordered after nothing of ours
                    torch.accelerator.set_stream(stream)
                fill(key, meta, data, part)

            list(self._pool.map(fill_in_stream, parts))

    def _cut(self, regions: list[Region], itemsize: int, *, is_direct: bool) -> list[Region]:
        """Cut regions into parts for threads, and below the size of a stage where one is used."""
        total = sum(region.numel for region in regions)
        most = max(total, 1) if is_direct else self._stage_bytes // itemsize
        if self._num_threads > 1:
            most = min(most, max(-(-total // self._num_threads), _MIN_THREAD_BYTES // itemsize))
        if total <= most:
            return regions
        parts = []
        for region in regions:
            for start in range(0, region.numel, most):
                stop = min(start + most, region.numel)
                parts += [
                    Region(part.box, region.start + start + part.start)
                    for part in regions_of(region.box, (start, stop))
                ]
        return parts

    def _fill_directly(self, key: str, meta: TensorMeta, data: torch.Tensor, part: Region) -> None:
        del meta
        self._source.read(key, part.box, data.view(-1)[part.start : part.start + part.numel])

    def _fill_through_stage(self, key: str, meta: TensorMeta, data: torch.Tensor, part: Region) -> None:
        if next(self._unused, self) is None:  # two for each thread: one is copied from while the other is filled
            stage, copies = host_buffer(self._stage_bytes, data.device), DeviceCopies()
        else:
            stage, copies = self._stages.popleft()  # no other thread gets it
            copies.wait()
        values = stage[: part.numel * meta.dtype.itemsize].view(meta.dtype)
        self._source.read(key, part.box, values)
        with torch.no_grad():
            unpack(values, data, part.start, part.start + part.numel, non_blocking=True)
        copies.note(data)
        self._stages.append((stage, copies.begun()))
