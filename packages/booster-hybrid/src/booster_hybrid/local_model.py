"""`LocalModel`: which part of the model a rank holds: slices of parameters, layers, and copies of what stages share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.state import NamedTensors
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.tensor_parallel.split import Split


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """What a rank holds of a model.

    Args:
        tensor_group: The tensor parallel ranks.
        splits: The parameters that are split over them, by name.
        expert_group: The expert parallel ranks.
        expert_splits: The parameters of experts that are spread over those, by name. What is here of them may be split
            over the tensor parallel ranks.
        stage: This rank's position in the pipeline.
        pipeline: The ranks of the pipeline; ``None`` where there is none.
        is_owner: Tells by a tensor's name whether this stage is the first to hold it.
        copy_groups: For each set of positions in the pipeline that hold copies: their ranks.
    """

    tensor_group: RankGroup
    expert_group: RankGroup
    splits: Mapping[str, Split] = field(default_factory=dict)
    expert_splits: Mapping[str, Split] = field(default_factory=dict)
    stage: int = 0
    pipeline: ProcessGroup | None = None
    is_owner: Callable[[str], bool] = lambda _: True
    copy_groups: Mapping[tuple[int, ...], ProcessGroup] = field(default_factory=dict)

    def put_together(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor that is split as a parameter is, in the whole model's shape.

        Collective: the tensor parallel ranks; for experts that are spread, the expert parallel ones as well.
        """
        for splits, ranks in ((self.splits, self.tensor_group), (self.expert_splits, self.expert_group)):
            split = splits.get(name)
            if split is not None:
                local = split.spread(local, owned_only=True)
                collectives.all_reduce(local, group=ranks.group).wait()
        return local

    def whole_shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the shapes that parameters of this rank have in the whole model, by name.

        Args:
            model: The user's model, split.
        """
        name_of = NamedTensors.of(model).name_of
        shapes = {}
        for parameter in model.parameters():
            name = name_of[id(parameter)]
            split = self.expert_splits.get(name) or self.splits.get(name)
            shapes[name] = tuple(parameter.shape) if split is None else split.global_shape
        return shapes

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole model's shape, for a parameter that is here."""
        for splits in (self.expert_splits, self.splits):
            split = splits.get(name)
            if split is not None:
                whole = split.take(whole)
        return whole

    def from_stage(self, value: Tensor | None, stage: int) -> Tensor | None:
        """Return on every rank of the pipeline what one of them has.

        Args:
            value: The tensor, on that rank.
            stage: Its position.

        Collective: the ranks of the pipeline.
        """
        if self.pipeline is None:
            return value
        meta = [None if value is None else (value.shape, value.dtype, value.device)]
        dist.broadcast_object_list(meta, group=self.pipeline, group_src=stage)
        if meta[0] is None:
            return None
        shape, dtype, device = meta[0]
        here = value.contiguous() if value is not None else torch.empty(shape, dtype=dtype, device=device.type)
        dist.broadcast(here, group=self.pipeline, group_src=stage)
        return here
