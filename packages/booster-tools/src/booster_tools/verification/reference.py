"""The same training in one process, with torch alone: what a boosted run is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster_runtime.data import leaves_by_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from booster_tools.verification.losses import Losses


@dataclass
class Reference:
    """One process's training.

    Attributes:
        initial: Parameters by name, before the first step.
        outputs: The evaluation outputs of each share of the batch, by path.
        evaluation_losses: The evaluation loss of each share.
        losses: Of each step, the loss of each share.
        gradients: Of each step, the gradient by parameter name.
        final: Parameters by name, after the last step.
        exact: The same training without autocast, where this one was in low precision: tells how far rounding alone
            moves each tensor.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    evaluation_losses: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    exact: Reference | None = None


def train_reference(
    model: nn.Module,
    optimizer: Optimizer,
    losses: Losses,
    shares: list[Any],
    steps: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Reference:
    """Train on shares of a batch in turn, whose mean loss a step follows, as data parallel ranks do together.

    Args:
        model: The user's model, without dropout.
        optimizer: Over its parameters.
        losses: How the loss of a share is computed.
        shares: What each data parallel rank gets of the batch.
        steps: Number of steps, all on the same batch.
        autocast: Makes the context of each forward.
    """
    reference = Reference(initial=copies(model))
    with _forwards_under(model, autocast):
        model.eval()
        with torch.no_grad():
            for share in shares:
                loss, outputs = losses.forward(model, share)
                reference.outputs.append(floating_leaves(outputs))
                reference.evaluation_losses.append(float(loss))
        model.train()
        for _ in range(steps):
            of_step = []
            for share in shares:
                loss, _ = losses.forward(model, share)
                (loss / len(shares)).backward()  # type: ignore[no-untyped-call]
                of_step.append(float(loss.detach()))
            reference.losses.append(of_step)
            reference.gradients.append(
                {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
            )
            optimizer.step()
            optimizer.zero_grad()
    reference.final = copies(model)
    return reference


@contextlib.contextmanager
def _forwards_under(model: nn.Module, make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run each forward of a model in a context of its own."""
    entered: list[AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        entered.append(make())
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    before = model.register_forward_pre_hook(enter, prepend=True)
    after = model.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def floating_leaves(outputs: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors of outputs, by their path."""
    leaves = leaves_by_path(dict(outputs) if isinstance(outputs, Mapping) else outputs)[0]
    return {
        path: leaf.detach().float().cpu().clone()
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }


def copies(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters, by name."""
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
