"""A mesh of ranks with named axes, as arithmetic that needs no ranks, and its process groups.

A mesh lists its axes from the outermost to the innermost. Ranks of the innermost axis are neighbours, so the axis that
communicates most comes last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_runtime.collectives import new_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the axes of a mesh.

    Args:
        sizes: Size of each axis by name, outermost first. An axis of size 1 costs nothing.

    Raises:
        ConfigError: If a size is below 1.
    """

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                msg = f"`{name}_size={size}` must be at least 1, which leaves that axis out."
                raise ConfigError(msg)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index along each axis."""
        found = {}
        for name, size in reversed(tuple(self.sizes.items())):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.sizes}

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Return the groups of ranks that differ along the given axes only.

        Args:
            axes: Names of axes; together they count as one axis, in the mesh's order.

        Returns:
            Each group's ranks in ascending order; the groups partition the world.
        """
        first = self._offsets([name for name in self.sizes if name not in axes])
        along = self._offsets([name for name in self.sizes if name in axes])
        return [[rank + offset for offset in along] for rank in first]

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """Return the ranks whose index is zero along all other axes, in ascending order."""
        found, stride = [0], self.world_size
        for name, size in self.sizes.items():
            stride //= size
            if name in axes:
                found = [rank + index * stride for rank in found for index in range(size)]
        return found


def fill_axis(sizes: Mapping[str, int], axis: str, world_size: int) -> MeshShape:
    """Return a mesh in which the size of one axis follows from the number of ranks.

    Args:
        sizes: Size of each axis, outermost first; that of ``axis`` is ignored.
        axis: The axis to fill.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the other sizes' product does not divide the number of ranks.
    """
    asked = {name: size for name, size in sizes.items() if name != axis}
    shape = MeshShape(asked)
    if world_size % shape.world_size:
        product = " * ".join(f"{name}_size={size}" for name, size in asked.items())
        divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        msg = (
            f"`{product}` is {shape.world_size}, which does not divide the world size {world_size}. Use sizes whose "
            f"product is one of {divisors}."
        )
        raise ConfigError(msg)
    return MeshShape({name: world_size // shape.world_size if name == axis else size for name, size in sizes.items()})


@dataclass(frozen=True)
class Axis:
    """This rank's place along one or several axes of a mesh.

    Args:
        group: The process group of the ranks along it.
        ranks: Those ranks, in the order of their coordinates.
        index: This rank's position among them.
    """

    group: ProcessGroup
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """Number of ranks along it."""
        return len(self.ranks)


def make_axes(shape: MeshShape, wanted: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Axis]:
    """Make the process groups of a mesh.

    ``torch.distributed.device_mesh`` makes a group for every single axis, used or not, and none for several axes that
    count as one; so the groups are made here.

    Args:
        shape: The mesh; its size is that of the world.
        wanted: Axes, or sets of axes that count as one; those with the same ranks share a group.

    Raises:
        ConfigError: If the mesh is not of the world's size.

    Collective: every rank of the world.
    """
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    if shape.world_size != world_size:
        msg = f"The mesh {dict(shape.sizes)} has {shape.world_size} ranks, but the world has {world_size}."
        raise ConfigError(msg)
    # Axes of size 1 make no difference.
    long = {axes: tuple(name for name in axes if shape.sizes[name] > 1) for axes in wanted}
    made = {}
    for axes in dict.fromkeys(long.values()):
        groups = shape.groups(axes)
        group = new_groups(groups)
        assert group is not None, "every rank is somewhere along each axis"
        [ranks] = [ranks for ranks in groups if rank in ranks]
        made[axes] = Axis(group, tuple(ranks), ranks.index(rank))
    return {axes: made[kept] for axes, kept in long.items()}
