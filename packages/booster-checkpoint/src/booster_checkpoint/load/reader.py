"""Reads what a shard needs, and nothing else, from a checkpoint into the shard's memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

from booster_core.state import Region, regions_of, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from booster_core.state import Box, TensorMeta, TensorShard

_MIN_THREAD_BYTES = 1 << 20
"""Parts smaller than this are not worth a thread."""


class ReadableTensors(Protocol):
    """Something that tensors can be read from in parts."""

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """What the tensors are, by name."""

    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor; see `booster_checkpoint.files.formats.TensorFile.read`."""


class ShardReader:
    """Fills shards. A context manager, which owns its threads.

    Values go straight into memory where dtype, device and layout allow it; otherwise they travel through at most one
    bucket.

    Args:
        source: The checkpoint.
        bucket_bytes: Most memory to use besides the shards' own, in bytes.
        num_threads: How many parts of a shard are read at once.
        progress: Told the number of bytes after each read.
    """

    def __init__(
        self,
        source: ReadableTensors,
        bucket_bytes: int,
        *,
        num_threads: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._source = source
        self._stage_bytes = max(bucket_bytes // num_threads, 16)
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "checkpoint reader") if num_threads > 1 else None
        self._stages: list[torch.Tensor] = []
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._stages = []

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
            list(self._pool.map(lambda part: fill(key, meta, data, part), parts))
        if self._progress is not None:
            self._progress(shard.numel * meta.dtype.itemsize)

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
        try:
            stage = self._stages.pop()  # list.pop is atomic: each thread takes a stage of its own
        except IndexError:
            stage = torch.empty(self._stage_bytes, dtype=torch.uint8)
        values = stage[: part.numel * meta.dtype.itemsize].view(meta.dtype)
        self._source.read(key, part.box, values)
        with torch.no_grad():
            unpack(values, data, part.start, part.start + part.numel)
        self._stages.append(stage)
