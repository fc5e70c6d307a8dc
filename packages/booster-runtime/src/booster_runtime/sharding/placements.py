"""Which part of a distributed tensor a rank holds: index arithmetic over placements, without process groups.

Each dimension of a tensor is described by the index ranges that are held, in their order. One rank usually holds one
box; a dimension that is sharded by two axes of a mesh out of order (``_StridedShard``) may leave several.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from booster_core.state import Box

Ranges = list[tuple[int, int]]
"""Half-open index ranges of one dimension, in the order in which they are held; none empty, none touching the next."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How one axis of a mesh cuts one dimension of a tensor.

    Args:
        dim: The tensor's dimension.
        parts: Number of ranks along the axis.
        index: This rank's place among them.
        split_factor: Into how many equal pieces the dimension is cut first, each of which is then split; more than 1
            where an axis further right has its cut outside of this one's (torch's ``_StridedShard``).
    """

    dim: int
    parts: int
    index: int
    split_factor: int = 1


def local_boxes(shape: Sequence[int], splits: Sequence[Split]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of the whole tensor that are held, each with its box in the local tensor.

    Args:
        shape: Shape of the whole tensor.
        splits: The cuts, in the order of the mesh's axes.

    Nothing is yielded where nothing is held.
    """
    held: list[Ranges] = [[(0, size)] if size else [] for size in shape]
    for split in splits:
        held[split.dim] = _split(held[split.dim], split)
    local = [_offsets(ranges) for ranges in held]
    for chosen in itertools.product(*(range(len(ranges)) for ranges in held)):
        yield (
            tuple(held[dim][index] for dim, index in enumerate(chosen)),
            tuple(local[dim][index] for dim, index in enumerate(chosen)),
        )


def _split(ranges: Ranges, split: Split) -> Ranges:
    """Return what a cut leaves of a dimension: its piece of each of the ``split_factor`` pieces, as torch chunks."""
    length = sum(stop - start for start, stop in ranges)
    kept: Ranges = []
    for low, high in _chunks(length, split.split_factor):
        pieces = _chunks(high - low, split.parts)
        if split.index < len(pieces):
            start, stop = pieces[split.index]
            kept += _slice(ranges, low + start, low + stop)
    return _merged(kept)


def _chunks(length: int, parts: int) -> list[tuple[int, int]]:
    """Return the chunks that ``torch.chunk`` makes, which may be fewer than asked for."""
    if not length:
        return []
    size = -(-length // parts)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _slice(ranges: Ranges, low: int, high: int) -> Ranges:
    """Return the ranges between two positions of the concatenated ranges."""
    found, position = [], 0
    for start, stop in ranges:
        first, last = max(low - position, 0), min(high - position, stop - start)
        if first < last:
            found.append((start + first, start + last))
        position += stop - start
    return found


def _merged(ranges: Ranges) -> Ranges:
    merged: Ranges = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _offsets(ranges: Ranges) -> Ranges:
    """Return each range's position in the local tensor."""
    ends = list(itertools.accumulate(stop - start for start, stop in ranges))
    return [(end - (stop - start), end) for end, (start, stop) in zip(ends, ranges, strict=True)]
