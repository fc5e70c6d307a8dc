"""The mesh of a hybrid run: names and sizes of its axes, which ranks communicate, and who is where among them.

A mesh lists its axes from the outermost to the innermost. Ranks of the innermost axis are neighbours, so that what
communicates most, the tensor axis by default, stays within a host; every order computes the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_hybrid.rank_group import RankGroup
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


AXES = ("dp", "pp", "sp", "tp")
"""The axes, in the order that they have where none is asked for."""
COMMUNICATING = [("tp",), ("dp",), ("pp",), ("sp",), ("dp", "sp"), ("pp", "sp", "tp"), ()]
"""The sets of axes along which something is communicated: each is one group of ranks for whoever is in it.

Gradients are reduced over ``("dp", "sp")``; the ranks of ``("pp", "sp", "tp")`` work on the same batch.
"""

OF_EXPERTS = [("ep",), ("edp", "sp"), ("ep", "pp", "sp", "tp")]
"""The sets of axes along which experts communicate. The data parallel axis is ``edp`` times ``ep`` for them.

Tokens travel along ``("ep",)``; gradients of experts are reduced over ``("edp", "sp")``, whose ranks have the same
experts; the ranks of the last one take part in a forward together.
"""


def check_order(order: Sequence[str]) -> tuple[str, ...]:
    """Return an order of the axes.

    Raises:
        ConfigError: If it does not name each of them once.
    """
    if isinstance(order, str) or sorted(map(str, order)) != sorted(AXES):
        listed = repr(order) if isinstance(order, str) else f"({', '.join(map(repr, order))})"
        msg = (
            f"`mesh_order={listed}` must name each of {', '.join(map(repr, AXES))} once, from the outermost axis to "
            "the innermost, whose ranks are neighbours."
        )
        raise ConfigError(msg)
    return tuple(order)


def mesh_shape(sizes: Mapping[str, int], order: Sequence[str], world_size: int) -> MeshShape:
    """Return the mesh, in which data parallelism takes what the other axes leave of the world.

    Args:
        sizes: Size of each axis but ``"dp"``.
        order: All axes, the outermost first.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the sizes' product does not divide the number of ranks.
    """
    asked = {name: sizes.get(name, 1) for name in order if name != "dp"}
    shape = MeshShape(asked)
    if world_size % shape.world_size:
        product = " * ".join(f"{name}_size={size}" for name, size in asked.items())
        divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        msg = (
            f"`{product}` is {shape.world_size}, which does not divide the world size {world_size}. Use sizes whose "
            f"product is one of {divisors}."
        )
        raise ConfigError(msg)
    return MeshShape({name: asked.get(name, world_size // shape.world_size) for name in order})


def with_experts(shape: MeshShape, ep_size: int) -> MeshShape:
    """Return the mesh whose data parallel axis is two: ranks with the same experts, and ranks with different ones.

    Args:
        shape: The mesh; its ranks keep their numbers.
        ep_size: Number of ranks over which experts are spread, neighbours along the data parallel axis.

    Raises:
        ConfigError: If it does not divide the data parallel size.
    """
    size = shape.sizes["dp"]
    if size % ep_size:
        divisors = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        msg = (
            f"`ep_size={ep_size}` does not divide the data parallel size {size}, which is what the other sizes leave "
            f"of {shape.world_size} ranks. Use one of {divisors}."
        )
        raise ConfigError(msg)
    sizes: dict[str, int] = {}
    for name, number in shape.sizes.items():
        sizes |= {"edp": size // ep_size, "ep": ep_size} if name == "dp" else {name: number}
    return MeshShape(sizes)


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a mesh, and the groups along its axes.

    Args:
        shape: Names and sizes of the axes.
        axes: This rank's place along each set of axes that communicates.
    """

    shape: MeshShape
    axes: Mapping[tuple[str, ...], Axis]

    def __getitem__(self, names: tuple[str, ...]) -> Axis:
        """Return the place along some axes that count as one."""
        return self.axes[names]

    def ranks(self, name: str) -> RankGroup:
        """Return the ranks along one axis."""
        axis = self.axes[name,]
        return RankGroup(axis.group, axis.index, axis.size)

    def gathering_groups(self, ep_size: int) -> dict[tuple[int, ...], ProcessGroup]:
        """Make the groups in which sharded parameters are gathered, by their ranks.

        Collective: every rank of the world.
        """
        made = make_axes(with_experts(self.shape, ep_size), [("edp", "ep", "sp"), ("edp", "sp")])
        return {axis.ranks: axis.group for axis in made.values()}


def make_groups(shape: MeshShape, ep_size: int) -> Mesh:
    """Make the process groups of `COMMUNICATING` and `OF_EXPERTS`.

    Args:
        shape: The mesh.
        ep_size: As for `with_experts`.

    Raises:
        ConfigError: As for `with_experts`.

    Collective: every rank of the world.
    """
    split = with_experts(shape, ep_size)
    parts = {"dp": ("edp", "ep")}
    wanted = {
        axes: tuple(each for name in axes for each in parts.get(name, (name,)))
        for axes in (*COMMUNICATING, *OF_EXPERTS)
    }
    made = make_axes(split, list(dict.fromkeys(wanted.values())))
    if ep_size > 1:
        # Of their own: ranks may come to the reduction of a bucket before or after an exchange of tokens, and within a
        # group all ranks must make calls in one order.
        made |= make_axes(split, [("ep",)])
    return Mesh(shape, {axes: made[named] for axes, named in wanted.items()})


def meshes_to_plan(world_size: int) -> list[dict[str, Any]]:
    """Return arguments of the plugin that are worth comparing: ZeRO over what tensors and pipelines leave of the ranks.

    Args:
        world_size: Number of ranks.
    """
    sizes = [size for size in (2, 4, 8) if world_size % size == 0]
    both = [size for size in sizes if world_size % size**2 == 0]
    found: list[dict[str, Any]] = []
    for size in sizes:
        found += [{"tp_size": size, "zero_stage": stage} for stage in (1, 2, 3)] if size < world_size else []
    for tp_size, pp_size in [*((1, size) for size in sizes), *zip(both, both, strict=True)]:
        # With fewer microbatches, stages wait for a large part of the time.
        mesh = {"tp_size": tp_size, "pp_size": pp_size, "num_microbatches": 4 * pp_size}
        if tp_size == 1:
            del mesh["tp_size"]
        found.append(mesh if tp_size * pp_size == world_size else {**mesh, "zero_stage": 1})
    return found + [{"tp_size": size} for size in sizes if size == world_size]
