"""The mesh of a hybrid run: names and sizes of its axes, which ranks communicate, and who is where among them.

A mesh lists its axes from the outermost to the innermost. Ranks of the innermost axis are neighbours, so that what
communicates most, the tensor axis by default, stays within a host; every order computes the same. A plugin tells a
rank's place by `MeshAttributes`, whose names Colossal-AI's plugin has, too.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.absent import is_absent
from booster_hybrid.pipeline.schedule import make_schedule
from booster_runtime import collectives
from booster_runtime.collectives import new_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from booster_hybrid.config import HybridConfig


@dataclass(frozen=True)
class RankGroup:
    """Some ranks and this rank's place among them.

    Collectives leave alone what is absent, in a pipeline stage that does not run what makes it.

    Args:
        group: The process group; ``None`` for all ranks.
        rank: This rank's index in it.
        size: Number of ranks.

    Attributes:
        name: By which operations in compiled graphs find the group.
    """

    group: ProcessGroup | None
    rank: int
    size: int
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        group: Any = self.group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        object.__setattr__(self, "name", getattr(group, "group_name", ""))

    @classmethod
    def of(cls, group: ProcessGroup | None) -> RankGroup:
        """Return the place of this rank in a process group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def all_reduce(self, tensor: Tensor) -> collectives.Pending:
        """Start summing a tensor over the ranks, in place; see `booster_runtime.collectives.all_reduce`.

        Collective: the group.
        """
        if is_absent(tensor):
            return collectives.Pending()
        return collectives.all_reduce(tensor, group=self.group)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> collectives.Pending:
        """Start filling a flat buffer with the ranks' slices; see `booster_runtime.collectives.all_gather`.

        Collective: the group.
        """
        if is_absent(buffer):
            return collectives.Pending()
        return collectives.all_gather(buffer, bounds, self.group)

    def reduce_scatter(self, source: Tensor, bounds: Sequence[int], out: Tensor) -> collectives.Pending:
        """Start summing flat buffers into a slice for each rank; see `booster_runtime.collectives.reduce_scatter`.

        Collective: the group.
        """
        if is_absent(source):
            return collectives.Pending()
        return collectives.reduce_scatter(source, bounds, out, self.group)

    def all_to_all(
        self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]
    ) -> collectives.Pending:
        """Start exchanging slices of flat buffers; see `booster_runtime.collectives.all_to_all`.

        Collective: the group.
        """
        if is_absent(source):
            return collectives.Pending()
        return collectives.all_to_all(source, sent, out, received, self.group)

    def __deepcopy__(self, memo: object) -> RankGroup:
        """Refuse to copy what is part of a model: a copy would not sum what its parts of layers give.

        Raises:
            ConfigError: Always.
        """
        refuse_copy()


@dataclass(frozen=True)
class AloneRank(RankGroup):
    """A rank that keeps its place among others and sums with nobody: who has made it does so elsewhere."""

    def all_reduce(self, tensor: Tensor) -> collectives.Pending:
        """Leave a tensor as it is."""
        del tensor
        return collectives.Pending()

    def __deepcopy__(self, memo: object) -> RankGroup:
        """Return itself where there are no others.

        Raises:
            ConfigError: If there are.
        """
        return self if self.size == 1 else super().__deepcopy__(memo)


def refuse_copy() -> NoReturn:
    """Raise for a copy of a model that hybrid parallelism has split.

    Raises:
        ConfigError: Always.
    """
    msg = (
        "A model that is split over ranks can't be copied: its layers' parameters, gradients and messages belong "
        "together. Copy it before `boost`, and boost the copy as well; for a running mean of the parameters, use "
        "`booster_runtime.ema(booster, model, decay)`."
    )
    raise ConfigError(msg)


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


@dataclass(frozen=True)
class PipelinePosition:
    """A rank's place in the pipeline, under the names of Colossal-AI's stage manager.

    Args:
        stage: The rank's position, counted from 0.
        num_stages: Ranks of the pipeline.
        first: Position of the rank that holds the model's first stage.
        last: Position of the rank that holds the last one, and so has outputs and loss; under ``"zbv"`` the first.
    """

    stage: int
    num_stages: int
    first: int
    last: int

    def is_first_stage(self, *, ignore_chunk: Literal[True] = True) -> bool:
        """Return whether one of this rank's stages is the model's first one, where batches enter."""
        return self._is_at(self.first, ignore_chunk=ignore_chunk)

    def is_last_stage(self, *, ignore_chunk: Literal[True] = True) -> bool:
        """Return whether one of them is the last one: this rank gets losses and outputs of `execute_pipeline`."""
        return self._is_at(self.last, ignore_chunk=ignore_chunk)

    def _is_at(self, position: int, *, ignore_chunk: bool) -> bool:
        if not ignore_chunk:  # which would ask about the chunk that runs at the moment
            msg = "`ignore_chunk=False` is not known: the answer is about all stages of this rank. Leave it out."
            raise ConfigError(msg)
        return self.stage == position


class _Group:
    """The ranks along an axis, made by `boost`.

    Args:
        axis: The axis.
    """

    def __init__(self, axis: str) -> None:
        self._axis = axis

    def __get__(self, plugin: MeshAttributes, _: type) -> ProcessGroup:
        """Return the process group.

        Raises:
            ConfigError: If no model was boosted yet: making groups takes every rank, and a script may ask on one.
        """
        made = plugin._made_for  # noqa: SLF001 - its own
        if not dist.is_initialized() or made is None or made[0] is not dist.group.WORLD:
            msg = f"`plugin.{self._axis}_group` is made when a model is boosted. Ask for it after `booster.boost(...)`."
            raise ConfigError(msg)
        uses_tensor_ranks = self._axis == "sp" and plugin.config.sequence.mode == "split_gather"
        return made[1]["tp" if uses_tensor_ranks else self._axis,].group


class MeshAttributes:
    """Attributes of a plugin that tell a rank's place in the mesh.

    Attributes:
        config: The sizes of the axes.
        dp_group: The ranks that get different batches and hold the same part of the model.
        tp_group: The ranks over which this rank's layers are split.
        pp_group: The ranks of this rank's pipeline, in the order of their positions.
        sp_group: Those over which its sequences are split; under ``"split_gather"`` those of ``tp_group``.
        ep_group: Those over which its experts are spread.
    """

    config: HybridConfig
    _made_for: tuple[Any, Mesh] | None = None
    _has_warned = False
    dp_group, tp_group, pp_group, sp_group, ep_group = map(_Group, ("dp", "tp", "pp", "sp", "ep"))

    @property
    def tp_size(self) -> int:
        """Ranks over which each layer is split."""
        return self.config.tp_size

    @property
    def pp_size(self) -> int:
        """Ranks over which the layers are spread."""
        return self.config.pipeline.size

    @property
    def sp_size(self) -> int:
        """Ranks over which sequences are split; 1 under ``"split_gather"``, which uses the tensor parallel ranks."""
        return self.config.sequence.size

    @property
    def ep_size(self) -> int:
        """Ranks over which experts are spread; they are data parallel ranks."""
        return self.config.ep_size

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO; 0 where the state is replicated."""
        return 0 if self.config.zero is None else self.config.zero.stage

    @property
    def dp_size(self) -> int:
        """Ranks that get different batches: what the other sizes leave of the world."""
        return self._launched("dp_size").sizes["dp"]

    @property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's index along each of the axes ``"dp"``, ``"pp"``, ``"sp"`` and ``"tp"``."""
        return self._launched("coordinates").coordinates(dist.get_rank())

    @property
    def stage_manager(self) -> PipelinePosition | None:
        """This rank's place in the pipeline; ``None`` where ``pp_size=1`` makes none."""
        pipeline = self.config.pipeline
        if pipeline.size == 1:
            return None
        placement = make_schedule(pipeline.style, pipeline.size, 1, pipeline.num_chunks).placement
        index = self._launched("stage_manager").coordinates(dist.get_rank())["pp"]
        last = placement.rank_of(placement.num_stages - 1)
        return PipelinePosition(index, pipeline.size, first=placement.rank_of(0), last=last)

    @property
    def _splits_nothing(self) -> bool:
        sizes = self.tp_size, self.pp_size, self.sp_size, self.ep_size
        return dist.is_initialized() and dist.get_world_size() > 1 and max(sizes) == 1 and self.config.zero is None

    def _warn_of_plain_data_parallelism(self) -> None:
        """Say once, on rank 0, that every rank will hold all of a model."""
        if not self._splits_nothing or self._has_warned:
            return
        self._has_warned = True
        if dist.get_rank() == 0:
            logging.getLogger("booster").warning(
                "Plugin 'hybrid' splits nothing: with tp_size=1, pp_size=1, sp_size=1 and zero_stage=0 each of %d "
                "ranks holds the whole model, its gradients and its optimizer state, as under plugin 'ddp'. Pass "
                "`HybridParallelPlugin(tp_size=...)`, `pp_size`, `sp_size` or `zero_stage`, or choose another plugin.",
                dist.get_world_size(),
            )

    def _launched(self, asked: str) -> MeshShape:
        """Return the mesh; raise if there is no process group yet."""
        if not dist.is_initialized():
            msg = f"`plugin.{asked}` needs the process group. Ask for it after `launch_from_torch()`."
            raise ConfigError(msg)
        return self._shape(dist.get_world_size())

    def _shape(self, world_size: int) -> MeshShape:
        return mesh_shape(self.config.sizes, self.config.mesh_order, world_size)
