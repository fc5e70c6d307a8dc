"""Which rank has which positions of a sequence: arithmetic that needs no ranks.

Any length is split without padding: the first ranks have a position more. Under a causal mask late positions look at
more than early ones do, so ring attention cuts a sequence into twice as many chunks as there are ranks, and a rank
takes one from either end (zigzag placement): every rank then has as much to do as any other::

    4 ranks, contiguous      0 0 1 1 2 2 3 3
    4 ranks, zigzag          0 1 2 3 3 2 1 0
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from booster_hybrid.tensor_parallel.split import cut_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """How the positions of sequences of one length are split.

    Args:
        length: Number of positions; where it is less than there are ranks, some have none.
        size: Number of ranks.
        zigzag: Give each rank a chunk from either end.
    """

    length: int
    size: int
    zigzag: bool = False

    @cached_property
    def ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank the half-open ranges of its positions, in increasing order."""
        if not self.zigzag:
            return tuple((span,) for span in cut_units(self.length, self.size))
        chunks = cut_units(self.length, 2 * self.size)
        return tuple((chunks[rank], chunks[2 * self.size - 1 - rank]) for rank in range(self.size))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.ranges)

    def take(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's part of a tensor.

        Args:
            whole: Any tensor whose dimension ``dim`` is the sequence.
            dim: That dimension.
            rank: The rank.

        Returns:
            A view where the part is in one piece, else a copy.
        """
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def put_together(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor of which each rank has a part; the inverse of `take`.

        Args:
            parts: Each rank's part.
            dim: The sequence's dimension.
        """
        pieces = []
        for part, spans in zip(parts, self.ranges, strict=True):
            position = 0
            for start, stop in spans:
                pieces.append((start, part.narrow(dim, position, stop - start)))
                position += stop - start
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in pieces], dim)
