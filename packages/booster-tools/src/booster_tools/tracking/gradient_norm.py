"""`GradientNorm`: a meter for the gradient norm of loops that do not clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.plugin import OptimizerWrapper
from booster_tools.tracking.interface import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer


class GradientNorm(Meter):
    """Computes the global gradient norm before each step of a loop that does not clip, for its ``grad_norm``.

    Args:
        optimizer: The boosted optimizer.

    Raises:
        TypeError: If the optimizer is not a boosted one.

    Collective: none; the steps inside of `track` are, as ``clip_grad_by_norm`` is.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, OptimizerWrapper):
            msg = f"`GradientNorm` needs the optimizer returned by `Booster.boost`; got `{type(optimizer).__name__}`."
            raise TypeError(msg)
        self._optimizer = optimizer

    def start(self) -> None:
        """Begin to look at the gradients before each step."""
        self._optimizer.before_step.append(self._compute)

    def stop(self) -> None:
        """End it."""
        self._optimizer.before_step.remove(self._compute)

    def measure(self, seconds: float, metrics: Mapping[str, Any]) -> Mapping[str, float | Tensor]:
        """Return nothing: the step's own metrics have the norm."""
        del seconds, metrics
        return {}

    @staticmethod
    def _compute(optimizer: OptimizerWrapper) -> bool:
        if not optimizer.found_overflow:
            optimizer.grad_norm()
        return False
