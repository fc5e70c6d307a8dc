"""`GeminiEngine` and `GeminiOptimizer`: chunks whose blocks are in several memories, stepped on wherever they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.gradients import check_finite_norm, global_norm
from booster_zero.engine import Role, ShardedEngine, ZeroOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class GeminiEngine(ShardedEngine):
    """Keeps the parameters of a model in chunks.

    Args:
        *args: As for `ShardedEngine`.
        chosen: Numbers of the parameters in leaves, of which each rank may use others. They are reduced when backward
            has ended: ranks would come to their reductions at different times among their gathers.
        **kwargs: As for `ShardedEngine`.

    Raises:
        ConfigError: If a parameter is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    def __init__(self, *args: Any, chosen: set[int], **kwargs: Any) -> None:
        self._chosen = chosen
        super().__init__(*args, **kwargs)
        self.reducer.repeated = {*chosen}

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Lay the chunks out by what the first round has shown; see `ShardedEngine.agree_on_record`.

        Raises:
            ConfigError: If other ranks still use parameters.

        Collective: every rank of the world.
        """
        return super().agree_on_record(order, late) | self._chosen

    def end_step(self) -> None:
        """Raise on every rank what went wrong on any apart from the step itself, which is complete.

        Where a budget does not hold what is gathered ahead of its use, nothing is gathered ahead from now on. A step in
        which chunks were laid out again does not tell how much is needed.

        Collective: every rank of the world, where blocks move; else none.
        """
        shortage: ConfigError | None = None
        try:
            self.memory.end_step()
        except ConfigError as caught:
            shortage = caught
        problem: Exception | None = self.memory.problem()
        gatherer = self.gatherer
        if self.is_anywhere(shortage) and not gatherer.stop_looking_ahead() and not gatherer.is_laid_out_again:
            problem = problem or shortage
        gatherer.is_laid_out_again = False
        self.raise_together(problem)


class GeminiOptimizer(ZeroOptimizer):
    """Steps one of the user's optimizers on this rank's slices of the chunks, wherever they are.

    Args:
        *args: As for `ZeroOptimizer`.
        **kwargs: As for `ZeroOptimizer`.
    """

    def gradients_in_parts(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of this rank's pieces, averaged over ranks, one chunk's at a time.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self.settle()
        for chunk in self.buckets():
            if chunk.has_gradient:
                with chunk.in_use(Role.GRAD, changes=True):
                    gradients = chunk.used_gradients()
                    if gradients:
                        yield gradients

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all shards of a replica, each element counted once, one chunk at a time."""
        # Rounded once, at the end, so that the norm does not depend on how chunks are cut.
        parts = [global_norm(part, norm_type, dtype=torch.float64) for part in self._parts_of_all()]
        group = self.engine.ranks.shard_group or dist.group.WORLD
        groups = [] if group is None else [group]
        norm = global_norm(parts, norm_type, groups=groups, dtype=self.norm_dtype, device=self.engine.device)
        if error_if_nonfinite:
            check_finite_norm(norm)
        if max_norm == math.inf:
            return norm
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as `clip_by_norm` does
        if norm.device.type != "cpu" or not bool(factor == 1.0):  # asking a device takes longer than multiplying
            for part in self._parts_of_all():
                torch._foreach_mul_(part, factor.to(part[0].device))
        return norm

    def _parts_of_all(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of all of the model's optimizers."""
        for optimizer in self.scaling.optimizers:
            yield from optimizer.gradients_in_parts()
