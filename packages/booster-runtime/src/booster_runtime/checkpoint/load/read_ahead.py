"""Loads from URLs: shards in the order of their places in the files, and what they need read before they ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_runtime.checkpoint.files.ranges import ReadAhead, byte_ranges
from booster_runtime.state.regions import regions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from booster_core.state import TensorShard
    from booster_runtime.checkpoint.load.source import Source
    from booster_runtime.storage import RemoteFile


def read_ahead(
    source: Source, shards: Iterable[TensorShard], homes: Mapping[str, str], most_bytes: int
) -> list[TensorShard]:
    """Start to read what shards need, and return them in the order in which that arrives.

    Args:
        source: A checkpoint at a URL.
        shards: The shards that will be filled; they keep their values.
        homes: For each of them that is in the checkpoint, by its key, the name of the tensor there.
        most_bytes: Memory for what has been read and is not in its shard yet.

    Collective: none.
    """
    files: dict[int, int] = {}
    placed: list[tuple[tuple[int, int], TensorShard, list[tuple[RemoteFile, int, int]]]] = []
    others = []
    for shard in shards:
        if shard.key not in homes or not shard.numel:
            continue
        key = homes[shard.key]
        place = source.place_of(key)
        if place is None or place[0].remote is None:
            others.append(shard)
            continue
        file, offset = place
        remote = file.remote
        assert remote is not None, "asked above"
        meta = source.tensors[key]
        uses = [
            (remote, *file.extent(start, stop))
            for region in regions_of(shard.box, shard.flat)
            for start, stop in byte_ranges(offset, meta.shape, meta.dtype.itemsize, region.box)
        ]
        placed.append(((files.setdefault(id(remote), len(files)), uses[0][1]), shard, uses))
    placed.sort(key=lambda entry: entry[0])
    ReadAhead((use for _, _, uses in placed for use in uses), most_bytes)
    return [*(shard for _, shard, _ in placed), *others]
