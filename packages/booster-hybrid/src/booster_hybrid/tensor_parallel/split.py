"""Which indices of a dimension lie on which tensor parallel rank: pure arithmetic.

A dimension consists of one or more equal blocks (a fused q/k/v projection has three), each of which is cut between
units that must stay whole (attention heads with the key/value head that they share). Where the number of units is no
multiple of the number of ranks, the first ranks have one unit more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from booster_core.state.shard import Box


@dataclass(frozen=True)
class Split:
    """How one tensor is cut over tensor parallel ranks.

    Args:
        global_shape: Shape of the whole tensor.
        dim: The dimension that is cut.
        ranges: The half-open index ranges of that dimension held here, in their order in the local tensor.
    """

    global_shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the whole tensor held here, in the order in which they follow each other along ``dim``."""
        whole = [(0, size) for size in self.global_shape]
        return tuple((*whole[: self.dim], span, *whole[self.dim + 1 :]) for span in self.ranges)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor here."""
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.global_shape[: self.dim], length, *self.global_shape[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of the whole tensor."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, self.dim)

    def parts(self, local: Tensor) -> list[Tensor]:
        """Return views of the local tensor, one for each box."""
        views, position = [], 0
        for start, stop in self.ranges:
            views.append(local.narrow(self.dim, position, stop - start))
            position += stop - start
        return views


def cut_units(num_units: int, size: int) -> list[tuple[int, int]]:
    """Return the range of units of each rank; the first ``num_units % size`` ranks have one more.

    Args:
        num_units: Number of units.
        size: Number of ranks.
    """
    share, more = divmod(num_units, size)
    starts = [rank * share + min(rank, more) for rank in range(size + 1)]
    return [(starts[rank], starts[rank + 1]) for rank in range(size)]


def split_dimension(
    shape: tuple[int, ...], dim: int, *, rank: int, size: int, num_units: int, num_blocks: int = 1
) -> Split:
    """Return the part of a tensor that a rank holds.

    Args:
        shape: Shape of the whole tensor.
        dim: The dimension to cut.
        rank: The rank.
        size: Number of ranks.
        num_units: Parts of each block that must stay whole; divides the block's length.
        num_blocks: Equal blocks of which the dimension consists.

    Raises:
        ConfigError: If there are fewer units than ranks, or the dimension is no multiple of them.
    """
    length = shape[dim] // num_blocks
    if num_units < size:
        msg = f"{num_units} units can't be split over {size} ranks. Use a tensor parallel size of at most {num_units}."
        raise ConfigError(msg)
    if shape[dim] % num_blocks or length % num_units:
        msg = (
            f"Dimension {dim} of shape {shape} is no multiple of {num_blocks} blocks of {num_units} units, so the "
            "policy does not describe this model."
        )
        raise ConfigError(msg)
    unit = length // num_units
    first, last = cut_units(num_units, size)[rank]
    return Split(
        shape,
        dim,
        tuple((block * length + first * unit, block * length + last * unit) for block in range(num_blocks)),
    )
