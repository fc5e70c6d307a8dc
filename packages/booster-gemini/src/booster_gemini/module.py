"""`GeminiModel`: the user's model run with its parameters fetched, and in the working precision."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from booster_zero.gathering import GatheringModel, ParameterHooks

if TYPE_CHECKING:
    from torch import nn

    from booster_core.precision import PrecisionPolicy
    from booster_zero.engine import Gatherer, ShardedEngine
    from booster_zero.gathering import LeafModules


class GeminiModel(GatheringModel):
    """The user's model, whose parameters are in chunks, and whole only while they are used.

    Args:
        module: The user's model.
        gatherer: Gathers its parameters.
        precision: Precision of the run.
        sharded: Its trained parameters; ``None`` where nothing is trained.
        leaves: As for `ParameterHooks`.
    """

    def __init__(
        self,
        module: nn.Module,
        gatherer: Gatherer,
        *,
        precision: PrecisionPolicy,
        sharded: ShardedEngine | None,
        leaves: LeafModules,
    ) -> None:
        super().__init__(module, precision=precision)
        self.attach_gatherer(gatherer)
        self._sharded = sharded
        self.hooks = ParameterHooks(module, gatherer, self._before_forward, self._after_forward, leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the user's model, which is a plain one, inside of `whole_parameters`.

        Raises:
            ConfigError: Outside of it, where parameters have no values.
        """
        return copy.deepcopy(self.unwrap(), memo)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, those in shards as well."""
        super().zero_grad(set_to_none)
        for optimizer in self.boosted_optimizers:
            optimizer.zero_grad(set_to_none)
