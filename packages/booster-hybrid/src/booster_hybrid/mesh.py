"""The mesh of a hybrid run: the order of its axes, the groups of ranks that communicate, and who is where in them.

An order lists the axes from the outermost to the innermost. Ranks of the innermost axis are neighbours, so that what
communicates most, the tensor axis by default, stays within a host; every order computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_hybrid.axes import MeshShape, fill_axis, make_axes
from booster_hybrid.rank_group import RankGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from booster_hybrid.axes import Axis

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


OF_RINGS = [("hosts",), ("ring",)]
"""The axes along which keys travel where ring attention has two rings. The sequence axis is one times the other."""


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
    return fill_axis({name: sizes.get(name, 1) for name in order}, "dp", world_size)


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
    return _with_two(shape, "dp", {"edp": size // ep_size, "ep": ep_size})


def with_rings(shape: MeshShape, ring_size: int) -> MeshShape:
    """Return the mesh whose sequence axis is two: ranks of one place in several inner rings, and ranks of one ring.

    Args:
        shape: The mesh; its ranks keep their numbers.
        ring_size: Number of ranks of an inner ring, neighbours along the sequence axis, whose size it divides.
    """
    return _with_two(shape, "sp", {"hosts": shape.sizes["sp"] // ring_size, "ring": ring_size})


def _with_two(shape: MeshShape, axis: str, two: Mapping[str, int]) -> MeshShape:
    sizes: dict[str, int] = {}
    for name, size in shape.sizes.items():
        sizes |= two if name == axis else {name: size}
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
        return _ranks_of(self.axes[name,])

    @property
    def rings(self) -> list[RankGroup] | None:
        """The two rings of ring attention, the outer one first; ``None`` where there is one."""
        return [_ranks_of(self.axes[name]) for name in OF_RINGS] if OF_RINGS[0] in self.axes else None

    def gathering_groups(self, ep_size: int) -> dict[tuple[int, ...], ProcessGroup]:
        """Make the groups in which sharded parameters are gathered, by their ranks.

        Collective: every rank of the world.
        """
        made = make_axes(with_experts(self.shape, ep_size), [("edp", "ep", "sp"), ("edp", "sp")])
        return {axis.ranks: axis.group for axis in made.values()}


def _ranks_of(axis: Axis) -> RankGroup:
    return RankGroup(axis.group, axis.index, axis.size)


def make_groups(shape: MeshShape, ep_size: int, ring_size: int | None = None) -> Mesh:
    """Make the process groups of `COMMUNICATING` and `OF_EXPERTS`, and of `OF_RINGS` where there are two rings.

    Args:
        shape: The mesh.
        ep_size: As for `with_experts`.
        ring_size: As for `with_rings`; ``None`` for one ring.

    Raises:
        ConfigError: As for `with_experts`.

    Collective: every rank of the world.
    """
    split = with_rings(with_experts(shape, ep_size), ring_size or 1)
    parts = {"dp": ("edp", "ep"), "sp": ("hosts", "ring")}
    wanted = {
        axes: tuple(each for name in axes for each in parts.get(name, (name,)))
        for axes in (*COMMUNICATING, *OF_EXPERTS, *(OF_RINGS if ring_size else ()))
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
