"""Loads from URLs: shards in the order of their places in the files, and what they need read before they ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_checkpoint.files.read_ahead import ReadAhead, byte_ranges
from booster_core.state import regions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from booster_checkpoint.load.source import Source
    from booster_checkpoint.storage import RemoteFile
    from booster_core.state import TensorShard


@dataclass(frozen=True, eq=False)
class Located:
    """A shard, and where its values are in files at a URL.

    Args:
        shard: The shard.
        ranges: Ranges of bytes of files, in the order in which they are read; none where that is not known.
    """

    shard: TensorShard
    ranges: tuple[tuple[RemoteFile, int, int], ...] = ()


def locate(source: Source, shards: Iterable[TensorShard], stored: Mapping[str, str]) -> list[Located]:
    """Return shards in the order of their places in the files; those without a known place come last.

    Args:
        source: A checkpoint at a URL.
        shards: The shards that will be filled.
        stored: For each of them that is a tensor of the files as it is stored, by its key, that tensor's name.
    """
    files: dict[int, int] = {}
    placed: list[tuple[tuple[int, int], Located]] = []
    others = []
    for shard in shards:
        place = source.place_of(stored[shard.key]) if shard.key in stored else None
        if place is None or place[0].remote is None or place[0].is_in_memory:
            others.append(Located(shard))
            continue
        file, offset = place
        remote = file.remote
        assert remote is not None, "asked above"
        meta = source.tensors[stored[shard.key]]
        ranges = tuple(
            (remote, *file.extent(start, stop))
            for region in regions_of(shard.box, shard.flat)
            for start, stop in byte_ranges(offset, meta.shape, meta.dtype.itemsize, region.box)
        )
        placed.append(((files.setdefault(id(remote), len(files)), ranges[0][1]), Located(shard, ranges)))
    placed.sort(key=lambda entry: entry[0])
    return [*(located for _, located in placed), *others]


def read_ahead(located: Iterable[Located], most_bytes: int) -> None:
    """Start to read what shards need that will be filled in this order.

    Args:
        located: The shards.
        most_bytes: Memory for what has been read and is not in its shard yet.
    """
    ReadAhead((each for one in located for each in one.ranges), most_bytes)
