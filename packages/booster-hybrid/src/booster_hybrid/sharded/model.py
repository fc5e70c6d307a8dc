"""`ShardedHybridModel`: the user's model, whose parameters are gathered over the data parallel ranks while in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_hybrid.model import HybridModel
from booster_zero.gathering import GatheringModel, ParameterHooks

if TYPE_CHECKING:
    from torch import nn

    from booster_core.precision import PrecisionPolicy
    from booster_hybrid.sharded.units import Units
    from booster_zero.engine import Gatherer, ShardedEngine


class ShardedHybridModel(GatheringModel, HybridModel):
    """`HybridModel` for ``zero_stage=3``.

    Args:
        module: The user's model.
        gatherer: Gathers its parameters.
        units: What of it is gathered together.
        precision: Precision of the run.
        sharded: Its trained parameters; ``None`` where nothing is trained.
        gathers_on_use: Whether parameters are gathered when modules run. Under a pipeline they are gathered once for
            each batch, by `whole_parameters`: data parallel ranks may have different numbers of microbatches.
    """

    def __init__(
        self,
        module: nn.Module,
        gatherer: Gatherer,
        units: Units,
        *,
        precision: PrecisionPolicy | None,
        sharded: ShardedEngine | None,
        gathers_on_use: bool,
    ) -> None:
        super().__init__(module, precision=precision, sharded=sharded)
        self.attach_gatherer(gatherer)
        self.hooks = None
        if gathers_on_use:
            self.hooks = ParameterHooks(
                module,
                gatherer,
                self._before_forward,
                self._after_forward,
                units.layers,
                with_model=units.rest,
                on_passed=None if sharded is None else sharded.reducer.leave_out,
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; see `HybridModel.forward`.

        Collective: every rank of the world: parameters are gathered.
        """
        return super().forward(*args, **kwargs)
