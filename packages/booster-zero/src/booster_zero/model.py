"""`ZeroModel`: the user's model run in the working precision, and the beginnings of its parallel life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.precision.casting import cast_floating
from booster_core.precision.narrow import NARROW
from booster_core.wrappers import ModelWrapper

if TYPE_CHECKING:
    from booster_core.precision import PrecisionPolicy
    from booster_zero.optimizer import ZeroOptimizer


class ZeroModel(ModelWrapper):
    """The user's model, whose parameters are views of buckets.

    Args:
        module: The user's model.
        precision: Precision of the run. Compute in a narrow format runs under autocast, although the parameters
            have that format: inputs and buffers may then be wider.
        optimizer: The optimizer that shards the parameters; ``None`` where nothing is trained.
    """

    def __init__(self, module: nn.Module, *, precision: PrecisionPolicy, optimizer: ZeroOptimizer | None) -> None:
        super().__init__(module, precision=precision)
        self._optimizer = optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; floating outputs of a narrow compute format come back in the policy's ``output_dtype``.

        Collective: none.
        """
        if self._optimizer is not None:
            self._optimizer.reducer.watch()
        precision = self.precision
        if precision is None or precision.compute_dtype not in NARROW:
            return self.module(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=precision.compute_dtype):
            outputs = self.module(*args, **kwargs)
        return cast_floating(outputs, precision.output_dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, those in shards as well.

        Collective: none.
        """
        super().zero_grad(set_to_none)
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none)
