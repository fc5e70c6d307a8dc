"""Which tensor parallel rank holds which indices of a dimension: pure arithmetic.

A dimension consists of one or more blocks (a fused q/k/v projection has three), each of which is cut between units that
must stay whole (attention heads). Units come in groups (the queries that use one key/value head): where there are at
least as many groups as ranks, groups stay whole; where there are fewer, the ranks are shared out among the groups, the
units of a group among its ranks, and blocks that are shared (keys and values) are on each of these. What does not
divide goes to the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_core.state import Box


@dataclass(frozen=True)
class Split:
    """How one tensor is cut over tensor parallel ranks.

    Args:
        global_shape: Shape of the whole tensor.
        dim: The dimension that is cut.
        ranges: The half-open index ranges of that dimension held here, in their order in the local tensor.
        owned: For each range whether this is the first rank that holds it; all are where it is empty.
        is_shared: Whether some ranks hold the same indices, so that gradients are summed.
    """

    global_shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    owned: tuple[bool, ...] = ()
    is_shared: bool = False

    def __post_init__(self) -> None:
        if not self.owned:
            object.__setattr__(self, "owned", (True,) * len(self.ranges))

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
        """Return a copy of this rank's part of the whole tensor; of one that repeats one number, no copy."""
        if is_repeated(whole):
            return whole.as_strided(self.local_shape, (0,) * whole.dim())
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dim).contiguous()  # `cat` keeps the memory format of its inputs

    def parts(self, local: Tensor) -> list[Tensor]:
        """Return views of the local tensor, one for each box."""
        views, position = [], 0
        for start, stop in self.ranges:
            views.append(local.narrow(self.dim, position, stop - start))
            position += stop - start
        return views

    def spread(self, local: Tensor, *, owned_only: bool) -> Tensor:
        """Return a tensor of the whole shape that holds the local values in their places, and zeros elsewhere.

        Args:
            local: This rank's part.
            owned_only: Leave out what this rank is not the first to hold.
        """
        whole = torch.zeros(self.global_shape, dtype=local.dtype, device=local.device)
        for (start, stop), is_owned, part in zip(self.ranges, self.owned, self.parts(local), strict=True):
            if is_owned or not owned_only:
                whole.narrow(self.dim, start, stop - start).copy_(part)
        return whole

    def counted(self, values: Tensor, start: int) -> Tensor:
        """Return those of a flat range of the local tensor that this rank is the first to hold.

        Args:
            values: The range's values, in any shape.
            start: Index of the first in the flattened local tensor.
        """
        if all(self.owned):
            return values
        mask = torch.zeros(self.local_shape, dtype=torch.bool, device=values.device)
        for is_owned, part in zip(self.owned, self.parts(mask), strict=True):
            part.fill_(is_owned)
        return values.reshape(-1)[mask.view(-1)[start : start + values.numel()]]


def is_repeated(tensor: Tensor) -> bool:
    """Return whether a tensor is one number seen everywhere, as what stands in for a tensor without values is."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 1 and all(stride == 0 for size, stride in steps if size > 1)


def cut_units(num_units: int, size: int) -> list[tuple[int, int]]:
    """Return the range of units of each rank; the first ``num_units % size`` ranks have one more.

    Args:
        num_units: Number of units.
        size: Number of ranks.
    """
    share, more = divmod(num_units, size)
    starts = [rank * share + min(rank, more) for rank in range(size + 1)]
    return list(pairwise(starts))


def cut_groups(num_units: int, num_groups: int, size: int, *, is_shared: bool = False) -> list[tuple[int, int]]:
    """Return the range of units of each rank, where units come in equal groups.

    Args:
        num_units: Number of units.
        num_groups: Number of groups of consecutive units.
        size: Number of ranks.
        is_shared: Where there are fewer groups than ranks, give each of a group's ranks all of its units.

    Raises:
        ConfigError: If the groups are not equal, or there are too few units.
    """
    if num_units % num_groups:
        msg = f"{num_units} units are no multiple of {num_groups} groups, so the policy does not describe this model."
        raise ConfigError(msg)
    per_group = num_units // num_groups
    if num_groups >= size:
        return [(first * per_group, last * per_group) for first, last in cut_units(num_groups, size)]
    if num_units < size and not is_shared:
        msg = f"{num_units} units can't be split over {size} ranks. Use a tensor parallel size of at most {num_units}."
        raise ConfigError(msg)
    ranges = []
    for group, (first, last) in enumerate(cut_units(size, num_groups)):
        own = [(0, per_group)] * (last - first) if is_shared else cut_units(per_group, last - first)
        ranges += [(group * per_group + start, group * per_group + stop) for start, stop in own]
    return ranges


@dataclass(frozen=True)
class Block:
    """A part of a dimension that is cut by itself.

    Args:
        num_units: Parts that must stay whole.
        num_groups: Groups that these make up.
        is_shared: Whether ranks may hold the same units.
        length: Of how many indices it consists; ``None`` where units of all blocks are equally long.
    """

    num_units: int
    num_groups: int
    is_shared: bool = False
    length: int | None = None


def split_dimension(shape: tuple[int, ...], dim: int, blocks: Sequence[Block], *, rank: int, size: int) -> Split:
    """Return the part of a tensor that a rank holds.

    Args:
        shape: Shape of the whole tensor.
        dim: The dimension to cut.
        blocks: What the dimension consists of.
        rank: The rank.
        size: Number of ranks.

    Raises:
        ConfigError: If there are fewer units than ranks, or the dimension is no multiple of them.
    """
    total = sum(block.num_units for block in blocks)
    lengths = [block.length or shape[dim] * block.num_units // total for block in blocks]
    units = [length // block.num_units for length, block in zip(lengths, blocks, strict=True)]
    if sum(unit * block.num_units for unit, block in zip(units, blocks, strict=True)) != shape[dim]:
        listed = " + ".join(str(block.num_units) for block in blocks)
        msg = f"Dimension {dim} of shape {shape} is no multiple of {listed} units, so the policy does not describe it."
        raise ConfigError(msg)
    ranges, owned, is_shared, begin = [], [], False, 0
    for unit, block in zip(units, blocks, strict=True):
        cuts = cut_groups(block.num_units, block.num_groups, size, is_shared=block.is_shared)
        first, last = cuts[rank]
        ranges.append((begin + first * unit, begin + last * unit))
        owned.append(cuts.index(cuts[rank]) == rank)
        is_shared = is_shared or len(set(cuts)) < size
        begin += block.num_units * unit
    return Split(shape, dim, tuple(ranges), tuple(owned), is_shared)
