"""`GeminiOptimizer`: the user's optimizer over this rank's slices of chunks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, OffloadError
from booster_core.gradients import check_finite_norm, global_norm
from booster_core.ranks import DistCoordinator
from booster_gemini.memory.home import Role
from booster_runtime import collectives
from booster_zero.engine.optimizer import ShardedOptimizer
from booster_zero.engine.parts import only, steps_in_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_gemini.chunk.chunk import Chunk
    from booster_gemini.chunk.manager import ChunkManager
    from booster_gemini.config import GeminiConfig
    from booster_zero.engine.layout import Layout


class GeminiOptimizer(ShardedOptimizer):
    """Steps the user's optimizer on this rank's slices of the chunks.

    Args:
        optim: The user's optimizer; its groups list this rank's pieces from now on.
        model: The user's model.
        manager: Its chunks.
        config: Options.
        **kwargs: As for `OptimizerWrapper`.

    Raises:
        ConfigError: If the optimizer, or a parameter, is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    layout: Layout[Chunk]

    def __init__(
        self, optim: Optimizer, model: nn.Module, *, manager: ChunkManager, config: GeminiConfig, **kwargs: Any
    ) -> None:
        self.manager = manager
        self._steps_in_parts = manager.home.moves and steps_in_parts(optim)
        super().__init__(
            optim,
            model,
            layout=manager.layout,
            ranks=manager.ranks,
            max_norm=config.max_norm,
            overlap=config.overlap_communication,
            unused=config.unused,
            partition=config.partition,
            broadcast_buffers=config.broadcast_buffers,
            **kwargs,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the optimizer inside; see `ShardedOptimizer.add_param_group`.

        Collective: none, but every rank must add the same, between a step and the next backward.
        """
        super().add_param_group(param_group)
        self._steps_in_parts = self._steps_in_parts and steps_in_parts(self.optim)

    def lay_out(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Do nothing: all parameters of the model lie in chunks already."""

    def buckets_in_order(self) -> Sequence[Chunk]:
        """Return the chunks last used first, as backward comes by them."""
        return self.layout.buckets[::-1]

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss, fetching chunks again, and reduce its gradients.

        Collective: every rank of the world.
        """
        self.manager.home.moment("backward")
        self.manager.begin("backward")
        try:
            super().backward(loss, inputs, retain_graph=retain_graph)
        finally:
            self.manager.end()

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Lay the chunks out in the order in which rank 0 used parameters first.

        Collective: every rank of the world.
        """
        repeated = super().agree_on_record(order, late)
        manager = self.manager
        new = collectives.all_gather_object(manager.order_of_first_use())[0]
        manager.first_uses = None
        if new != manager.present_order():
            manager.release_all()
            self.lay_out_anew(new)
            manager.after_laying_out()
        return repeated

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside on this rank's pieces; the next use of a chunk sees the result.

        Collective: every rank of the world.
        """
        self.manager.check_changes()
        self.manager.home.moment("step")
        result = self.update_pieces(closure)
        used = [chunk for chunk in self.layout.buckets if self.is_used(chunk)]
        if not self._steps_in_parts:
            for chunk in used:
                with chunk.at_hand(changes=True):
                    chunk.take_up_values()
        self.manager.publish(used)
        self._end_step()
        return result

    def _end_step(self) -> None:
        """Raise on every rank what went wrong on any beside the step itself, which is complete.

        Where a budget does not hold what is gathered ahead of its use, nothing is from now on. A step in which chunks
        were laid out anew does not tell how much is needed.

        Collective: every rank of the world, where blocks move; else none.
        """
        home = self.manager.home
        problem: Exception | None = None
        shortage: ConfigError | None = None
        try:
            home.end_step()
        except ConfigError as caught:
            shortage = caught
        problem = home.problem()
        manager = self.manager
        if self._is_anywhere(shortage) and not manager.stop_looking_ahead() and not manager.is_laid_out_anew:
            problem = problem or shortage
        manager.is_laid_out_anew = False
        self._raise_together(problem)

    def _is_anywhere(self, error: Exception | None) -> bool:
        if not self.manager.home.moves:
            return False
        flag = torch.tensor([error is not None], dtype=torch.uint8, device=self._device())
        collectives.all_reduce(flag, dist.ReduceOp.MAX).wait()
        return bool(flag.item())

    def _raise_together(self, error: Exception | None) -> None:
        if self._is_anywhere(error):
            DistCoordinator().raise_together(error, name="step")

    def step_pieces(self) -> Any:
        """Step on all pieces at once; where blocks may lie elsewhere, chunk by chunk, where each one's state lies.

        Raises:
            OffloadError: On every rank, if state could not be read on one; parameters have been stepped in part then.

        Collective: every rank of the world, where blocks move; else none.
        """
        if not self.manager.home.moves:
            return super().step_pieces()
        result, error = None, None
        try:
            result = self._step_at_home()
        except OffloadError as caught:
            error = caught
        self._raise_together(error)
        return result

    def _step_at_home(self) -> Any:
        chunks = [chunk for chunk in self.layout.buckets if self.is_used(chunk)]
        groups = [list(group["params"]) for group in self.param_groups]
        result = None
        with contextlib.ExitStack() as stack:
            for chunk in chunks:
                if not self._steps_in_parts:
                    stack.enter_context(chunk.stepping())
                    continue
                own = {id(piece.values) for piece in chunk.pieces}
                with chunk.stepping():
                    with only(self.optim, [[values for values in group if id(values) in own] for group in groups]):
                        result = self.optim.step()
                    chunk.house(self.hosted.states())
                    chunk.take_up_values()
            if not self._steps_in_parts:
                result = self.optim.step()
                states = self.hosted.states()
                for chunk in chunks:
                    chunk.house(states)
        return result

    # ---- gradients, chunk by chunk

    def gradients_in_parts(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of this rank's pieces, averaged over ranks, one chunk's at a time.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self.settle()
        for chunk in self.layout.buckets:
            if chunk.has_gradient:
                with chunk.in_use(Role.GRAD, changes=True):
                    gradients = chunk.gradients()
                    if gradients:
                        yield gradients

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all shards of a replica, each element counted once, one chunk at a time."""
        # Rounded once, at the end, so that the norm does not depend on how chunks are cut.
        parts = [global_norm(part, norm_type, dtype=torch.float64) for part in self.gradients_in_parts()]
        group = self.ranks.shard_group or dist.group.WORLD
        norm = global_norm(parts, norm_type, groups=[] if group is None else [group], dtype=torch.float32)
        if error_if_nonfinite:
            check_finite_norm(norm)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as `clip_by_norm` does
        if norm.device.type != "cpu" or not bool(factor == 1.0):  # asking a device takes longer than multiplying
            for part in self.gradients_in_parts():
                torch._foreach_mul_(part, factor)
        return norm
