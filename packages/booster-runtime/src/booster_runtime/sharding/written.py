"""Writing gradients by hand, between backward and the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import OptimizerWrapper

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def write_gradient(gradient: Tensor, values: Tensor, optimizer: Optimizer | None) -> None:
    """Copy values into a gradient, with the loss scale that the optimizer will take out.

    Args:
        gradient: A whole gradient, or a part of one.
        values: In its shape, without loss scale.
        optimizer: The boosted optimizer.

    Collective: none.
    """
    scaler = optimizer.loss_scaler if isinstance(optimizer, OptimizerWrapper) and not optimizer.is_unscaled else None
    with torch.no_grad():
        gradient.copy_(values if scaler is None else values * scaler.scale)


def not_optimized(name: str) -> ConfigError:
    """Return the error for a gradient that the boosted optimizer does not step with."""
    return ConfigError(
        f"The gradient of '{name}' can't be set: the boosted optimizer does not hold the parameter. Pass the optimizer "
        "with the model to `boost`, and list the parameter in it."
    )
