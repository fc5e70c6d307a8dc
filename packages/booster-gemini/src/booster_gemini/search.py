"""The size of chunks that wastes least: pure arithmetic on numbers of elements.

Chunks of a family are equally large, so that their buffers can take each other's place. What a chunk can't fill
because the next parameter doesn't fit is waste.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_zero.engine import lengths_of_flat

if TYPE_CHECKING:
    from collections.abc import Sequence

_CANDIDATES = 192
"""Sizes that are tried. Waste changes wherever a parameter more fits; finer steps find little more."""

_LARGEST = 4
"""How many times the smallest size is the largest one."""

_TOLERATED = 0.02
"""The part of all elements that may be wasted without looking for a larger size: larger chunks take more at once."""


def search_chunk_numel(numels: Sequence[int], world_size: int, min_numel: int, max_numel: int | None = None) -> int:
    """Return the number of elements per chunk that wastes least.

    Args:
        numels: Elements of each parameter, in the order in which they are laid out.
        world_size: Ranks that share each chunk.
        min_numel: The smallest chunk; the largest that is tried has four times as many.
        max_numel: Nothing larger is tried, where memory allows no more; it comes before ``min_numel``.

    Returns:
        The smallest size that wastes next to nothing; where there is none, the one that wastes least.
    """
    span = (_LARGEST - 1) * min_numel
    if max_numel is not None:
        min_numel = min(min_numel, max_numel)
        span = min(span, max_numel - min_numel)
    tried = {min_numel + span * step // _CANDIDATES for step in range(_CANDIDATES + 1)}
    sizes = sorted(tried | {max(_fullest(numels, world_size, size), min_numel) for size in tried})
    wasted: dict[int, int] = {}
    for size in sizes:
        wasted[size] = wasted_numel(numels, world_size, size)
        if wasted[size] <= _TOLERATED * sum(numels):
            return size
    return min(sizes, key=lambda size: (wasted[size], size))


def _fullest(numels: Sequence[int], world_size: int, chunk_numel: int) -> int:
    """Return the length of the fullest chunk of a size: cut to that, less is wasted."""
    lengths = lengths_of_flat(numels, world_size, chunk_numel)
    return max((length for length in lengths if length <= chunk_numel), default=chunk_numel)


def wasted_numel(numels: Sequence[int], world_size: int, chunk_numel: int) -> int:
    """Return how many elements stay empty in chunks of a size.

    The last chunk ends where its parameters end, and parameters larger than a chunk have one of their own.

    Args:
        numels: Elements of each parameter, in order.
        world_size: Ranks that share each chunk.
        chunk_numel: Elements per chunk.
    """
    lengths = lengths_of_flat(numels, world_size, chunk_numel)
    full = sum(max(length, chunk_numel) for length in lengths[:-1])
    return full + sum(lengths[-1:]) - sum(numels)
