"""Ranges of a flat buffer that is stored in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def overlaps(parts: Sequence[tuple[int, Tensor]], low: int, high: int) -> list[tuple[int, Tensor]]:
    """Return the pieces of the parts that fall into a range of the buffer, each with its offset in the buffer.

    Args:
        parts: Offset in the buffer and values of each part.
        low: First element of the range.
        high: One past its last element.
    """
    found = []
    for offset, part in parts:
        start, stop = max(offset, low), min(offset + part.numel(), high)
        if start < stop:
            found.append((start, part[start - offset : stop - offset]))
    return found
