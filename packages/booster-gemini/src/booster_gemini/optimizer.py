"""`GeminiOptimizer`: the user's optimizer over this rank's slices of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core import collectives
from booster_core.sharding.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.sharding.layout import Layout
    from booster_gemini.chunk.chunk import Chunk
    from booster_gemini.chunk.manager import ChunkManager
    from booster_gemini.config import GeminiConfig


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
        super().__init__(
            optim,
            model,
            layout=manager.layout,
            ranks=manager.ranks,
            max_norm=config.max_norm,
            overlap=config.overlap_communication,
            unused=config.unused,
            broadcast_buffers=config.broadcast_buffers,
            **kwargs,
        )

    def lay_out(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Do nothing: all parameters of the model lie in chunks already."""

    def buckets_in_order(self) -> Sequence[Chunk]:
        """Return the chunks last used first, as backward comes by them."""
        return self.layout.buckets[::-1]

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss, fetching chunks again, and reduce its gradients.

        Collective: every rank of the world.
        """
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
        result = self.update_pieces(closure)
        self.manager.publish([chunk for chunk in self.layout.buckets if self.is_used(chunk)])
        return result
