"""`RankGroup`: the ranks over which something is split, and the collectives that layers may use among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.absent import is_absent
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


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

    def __deepcopy__(self, memo: object) -> NoReturn:
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
