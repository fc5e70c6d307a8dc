"""`HybridOptimizer`: ZeRO over the data parallel ranks, for parameters that may be split over tensor parallel ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from booster_core import collectives
from booster_core.gradients.clip import clip_by_norm
from booster_zero.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from booster_hybrid.tensor_parallel.group import TensorGroup
    from booster_hybrid.tensor_parallel.split import Split


class HybridOptimizer(ZeroOptimizer):
    """Counts what is split over tensor parallel ranks on each of them, and what is whole on the first alone.

    Attributes:
        splits: The parameters that are split, by name; empty without tensor parallelism. The plugin sets it.
        tensor_group: The tensor parallel ranks; set likewise.
    """

    splits: Mapping[str, Split]
    tensor_group: TensorGroup

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over the whole model, each element counted once."""
        gradients = self.gradients()
        counted = []
        for piece in (piece for bucket in self.layout.buckets for piece in bucket.pieces):
            gradient, split = piece.values.grad, self.splits.get(self.names[piece.index])
            if gradient is None or not gradient.numel():
                continue
            if split is not None:
                counted.append(split.counted(gradient, piece.start))
            elif self.tensor_group.rank == 0:
                counted.append(gradient)
        groups = [self.ranks.shard_group, self.tensor_group.group]
        return clip_by_norm(
            gradients,
            max_norm,
            norm_type,
            counted=counted,
            groups=[group for group in groups if group is not None and dist.get_world_size(group) > 1],
            error_if_nonfinite=error_if_nonfinite,
        )

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of a parameter's gradient in the whole model's shape; ``None`` where no rank used it.

        Collective: every rank of the world.
        """
        local = super().full_gradient(parameter)
        return None if local is None else self.put_together(self.names[self._index_of[id(parameter)]], local)

    def put_together(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor that is split as a parameter is, in the whole model's shape.

        Collective: the tensor parallel ranks.
        """
        split = self.splits.get(name)
        if split is None:
            return local
        whole = split.spread(local, owned_only=True)
        collectives.all_reduce(whole, group=self.tensor_group.group).wait()
        return whole
