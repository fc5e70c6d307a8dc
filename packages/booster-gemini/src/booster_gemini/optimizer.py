"""`GeminiOptimizer`: the user's optimizer over this rank's slices of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.gradients import check_finite_norm, global_norm
from booster_runtime import collectives
from booster_zero.engine import Role, ZeroOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_gemini.chunk.manager import ChunkManager
    from booster_zero.engine import Bucket


class GeminiOptimizer(ZeroOptimizer):
    """Steps the user's optimizer on this rank's slices of the chunks, wherever they are.

    Args:
        optim: The user's optimizer; its groups list this rank's pieces from now on.
        model: The user's model.
        manager: Its chunks.
        held: The ``id`` of the parameters that the optimizer lists; those of groups that are added later are added.
        chosen: Numbers of the parameters in leaves, of which each rank may use others. They are reduced when backward
            has ended: ranks would come to their reductions at different times among their gathers.
        **kwargs: As for `ZeroOptimizer`.

    Raises:
        ConfigError: If the optimizer, or a parameter, is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    def __init__(
        self,
        optim: Optimizer,
        model: nn.Module,
        *,
        manager: ChunkManager,
        held: set[int],
        chosen: set[int],
        **kwargs: Any,
    ) -> None:
        self.manager = manager
        self._held = held
        self._chosen = chosen
        super().__init__(
            optim,
            model,
            layout=manager.layout,
            home=manager.home,
            gathers=manager,
            offloads=manager.home.moves,
            **kwargs,
        )
        self.reducer.repeated = {*chosen}

    def _adopt_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        # They are trained from now on, which takes a master where they are narrow.
        self._held.update(id(parameter) for group in groups for parameter in group["params"])
        super()._adopt_groups(groups)

    def in_order_of_forward(self) -> Sequence[Bucket]:
        """Return the chunks in the order in which they are laid out, which is that of their first use."""
        return self.layout.buckets

    def lay_out_again(self, order: list[int]) -> None:
        """Lay the chunks out in the order in which rank 0 used parameters first.

        Collective: every rank of the world.
        """
        del order  # which is that of backward
        manager = self.manager
        new = collectives.all_gather_object(manager.order_of_first_use())[0]
        manager.first_uses = None
        if new != self.layout.order():
            self.rebuild(new)

    def rebuild(self, order: Sequence[int]) -> None:
        """Move values, gradients and state to where they are when parameters are laid out in another order.

        Collective: every rank of the shard group.
        """
        self.manager.release_all()
        super().rebuild(order)
        self.manager.after_laying_out()

    def end_step(self) -> None:
        """Raise on every rank what went wrong on any apart from the step itself, which is complete.

        Where a budget does not hold what is gathered ahead of its use, nothing is gathered ahead from now on. A step in
        which chunks were laid out again does not tell how much is needed.

        Collective: every rank of the world, where blocks move; else none.
        """
        shortage: ConfigError | None = None
        try:
            self.home.end_step()
        except ConfigError as caught:
            shortage = caught
        problem: Exception | None = self.home.problem()
        manager = self.manager
        if self.is_anywhere(shortage) and not manager.stop_looking_ahead() and not manager.is_laid_out_again:
            problem = problem or shortage
        manager.is_laid_out_again = False
        self.raise_together(problem)

    # ---- gradients, chunk by chunk

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Lay the chunks out by what the first round has shown; see `ZeroOptimizer.agree_on_record`.

        Raises:
            ConfigError: If other ranks still use parameters.

        Collective: every rank of the world.
        """
        self._meet()
        return super().agree_on_record(order, late) | self._chosen

    def _meet(self) -> None:
        self.manager.order.meet(self.device)

    def settle(self) -> None:
        """Bring all gradients into the shards, and agree on which parameters were used.

        Raises:
            ConfigError: If ranks used parameters in different orders, so that their gradients are wrong.

        Collective: every rank of the world.
        """
        before = self._agreed_rounds
        if self.reducer.num_rounds != before:
            self._meet()
        super().settle()
        if self._agreed_rounds != before:
            self.manager.check_same_order()

    def gradients_in_parts(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of this rank's pieces, averaged over ranks, one chunk's at a time.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self.settle()
        for chunk in self.layout.buckets:
            if chunk.has_gradient:
                with chunk.in_use(Role.GRAD, changes=True):
                    gradients = chunk.used_gradients()
                    if gradients:
                        yield gradients

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all shards of a replica, each element counted once, one chunk at a time."""
        # Rounded once, at the end, so that the norm does not depend on how chunks are cut.
        parts = [global_norm(part, norm_type, dtype=torch.float64) for part in self.gradients_in_parts()]
        group = self.ranks.shard_group or dist.group.WORLD
        groups = [] if group is None else [group]
        norm = global_norm(parts, norm_type, groups=groups, dtype=torch.float32, device=self.device)
        if error_if_nonfinite:
            check_finite_norm(norm)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as `clip_by_norm` does
        if norm.device.type != "cpu" or not bool(factor == 1.0):  # asking a device takes longer than multiplying
            for part in self.gradients_in_parts():
                torch._foreach_mul_(part, factor.to(part[0].device))
        return norm
