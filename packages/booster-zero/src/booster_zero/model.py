"""`ZeroModel`: the user's model run in the working precision, and the beginnings of its parallel life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core import collectives
from booster_core.precision.casting import cast_floating
from booster_core.wrappers import ModelWrapper

if TYPE_CHECKING:
    from booster_core.precision import PrecisionPolicy
    from booster_zero.optimizer import ZeroOptimizer

NARROW = (torch.bfloat16, torch.float16)


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


def agree_on_values(model: nn.Module) -> None:
    """Give every rank the first rank's parameters and buffers.

    Collective: every rank of the world.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        send_first(tensor.data)


def send_first(tensor: torch.Tensor) -> None:
    """Give every rank the first rank's values of a tensor of any strides.

    Collective: every rank of the world.
    """
    dense = tensor.contiguous()
    # Backends move numbers; truth values are bytes to them.
    collectives.broadcast(dense.view(torch.uint8) if dense.dtype == torch.bool else dense).wait()
    if dense is not tensor:
        tensor.copy_(dense)


def kept_as_they_are(model: nn.Module) -> set[int]:
    """Return the ids of parameters that stay in their format under a narrow one.

    Batch normalisation computes its statistics in fp32, and torch's CPU kernel wants its parameters so as well.
    """
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the common base of all of them
        for parameter in module.parameters(recurse=False)
    }
