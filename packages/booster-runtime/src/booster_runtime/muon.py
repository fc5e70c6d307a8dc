"""`Muon` for matrices and for stacks of them, such as fused experts: each matrix is orthogonalized by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class Muon(Optimizer):
    """Momentum whose update is orthogonalized by a Newton-Schulz iteration, for parameters of 2 or 3 dimensions.

    The update and the settings are those of ``torch.optim.Muon``, which takes matrices only. Of a parameter of shape
    ``(experts, out, in)`` each matrix is updated as that class updates a parameter of shape ``(out, in)``; all are
    orthogonalized by one batched product. Under the plugins ranks share the work by its cost.

    Args:
        params: Matrices, and stacks of them. Give biases, norms and embeddings to another optimizer.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Of the average of gradients.
        nesterov: Update by a step ahead of the average.
        ns_coefficients: Of the iteration's polynomial.
        eps: Least norm that an update is divided by.
        ns_steps: Number of iterations.
        adjust_lr_fn: ``"original"`` (or ``None``) multiplies the learning rate by ``sqrt(max(1, out / in))``,
            ``"match_rms_adamw"`` by ``0.2 * sqrt(max(out, in))``, as AdamW's learning rates fit.

    Raises:
        ConfigError: If a parameter has other dimensions, or a setting is none of these.

    Reference: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
    scalable for LLM training" (arXiv:2502.16982).
    """

    is_by_matrix = True
    """Each matrix of a parameter's last two dimensions is updated by itself."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        for name, value in numbers.items():
            if value < 0:
                msg = f"`{name}={value}` is negative."
                raise ConfigError(msg)
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            msg = f"`adjust_lr_fn={adjust_lr_fn!r}` is unknown. Use 'original' or 'match_rms_adamw'."
            raise ConfigError(msg)
        settings = {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}
        super().__init__(params, {**numbers, **settings, "adjust_lr_fn": adjust_lr_fn})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ConfigError: If one is neither a matrix nor a stack of matrices.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() not in (2, 3):
                self.param_groups.pop()
                msg = (
                    "Muon updates matrices and stacks of matrices, of 2 or 3 dimensions; got a parameter of shape "
                    f"{tuple(parameter.shape)}. Give it to another optimizer, such as AdamW."
                )
                raise ConfigError(msg)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        update = self._orthogonalized(update, group)
        rows, columns = parameter.shape[-2:]
        is_matched = group["adjust_lr_fn"] == "match_rms_adamw"
        ratio = 0.2 * math.sqrt(max(rows, columns)) if is_matched else math.sqrt(max(1, rows / columns))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-float(group["lr"]) * ratio)

    def _orthogonalized(self, update: Tensor, group: dict[str, Any]) -> Tensor:
        return orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])


def orthogonalized(update: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Return about the nearest semi-orthogonal matrix of each matrix, by a Newton-Schulz iteration in bf16.

    Args:
        update: Shape ``(..., rows, columns)`` of 2 or 3 dimensions; left as it is.
        coefficients: Of the polynomial ``a x + b x^3 + c x^5``.
        num_steps: Number of iterations.
        eps: Least norm that a matrix is divided by.
    """
    a, b, c = coefficients
    product = torch.baddbmm if update.dim() == 3 else torch.addmm
    is_tall = update.shape[-2] > update.shape[-1]
    found = update.to(torch.bfloat16)
    found = found.mT if is_tall else found
    found = found / torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = found @ found.mT
        found = product(found, product(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if is_tall else found


def update_cost(shape: Sequence[int]) -> int:
    """Return what orthogonalizing a parameter of a shape costs, in multiply-adds of one iteration."""
    *stack, rows, columns = shape
    short, long = sorted((rows, columns))
    return math.prod(stack) * short * short * (2 * long + short)
