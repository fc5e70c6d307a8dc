"""`GatheringOptimizer`: the user's optimizer over this rank's slices of chunks that are gathered on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_runtime import collectives
from booster_zero.engine.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from booster_zero.engine.bucket import Bucket
    from booster_zero.gathering.manager import ChunkManager


class GatheringOptimizer(ZeroOptimizer):
    """Steps the user's optimizer on this rank's slices of the chunks.

    Args:
        optim: The user's optimizer; its groups list this rank's pieces from now on.
        model: The user's model.
        manager: Its chunks.
        held: The ``id`` of the parameters that the optimizer lists; those of groups that are added later are added.
        **kwargs: As for `ZeroOptimizer`.

    Raises:
        ConfigError: If the optimizer, or a parameter, is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    def __init__(self, optim: Optimizer, model: nn.Module, *, manager: ChunkManager, held: set[int], **kwargs: Any):
        self.manager = manager
        self._held = held
        super().__init__(optim, model, layout=manager.layout, home=manager.home, gathers=manager, **kwargs)

    def _adopt_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        # They are trained from now on, which takes a master where they are narrow.
        self._held.update(id(parameter) for group in groups for parameter in group["params"])
        super()._adopt_groups(groups)

    def in_order_of_forward(self) -> Sequence[Bucket]:
        """Return the chunks in the order in which they are laid out, which is that of forward."""
        return self.layout.buckets

    def rebuild(self, order: Sequence[int]) -> None:
        """Move values, gradients and state to where they are when parameters are laid out in another order.

        Collective: every rank of the shard group.
        """
        self.manager.release_all()
        super().rebuild(order)
        self.manager.after_laying_out()

    def lay_out_again(self, order: list[int]) -> None:
        """Lay the chunks out in the order in which rank 0 used parameters first.

        Collective: every rank of the world.
        """
        del order  # which is that of backward
        manager = self.manager
        if manager.keeps_all:  # the order of gathers makes no difference
            return
        new = collectives.all_gather_object(manager.order_of_first_use())[0]
        manager.first_uses = None
        if new != self.layout.order():
            self.rebuild(new)

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Lay the chunks out by what the first round has shown; see `ZeroOptimizer.agree_on_record`.

        Raises:
            ConfigError: If other ranks still use parameters.

        Collective: every rank of the world.
        """
        self._meet()
        return super().agree_on_record(order, late)

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
