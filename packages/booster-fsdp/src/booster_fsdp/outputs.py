"""Hooks on the outputs of units: copy views, and refuse backward through graphs that are older than the parameters.

torch gathers a unit for backward by a hook on its output. If the output is a view, such as that of a linear layer on a
three-dimensional input, an in-place operation on it (``x += y``) drops the hook, and with it the gradients of the unit.
Such a unit returns a copy instead of the view.

Autograd's check for in-place changes of saved tensors does not cover parameters that are gathered again for backward:
backward through a graph from before a step would use the parameters from after it, and compute wrong gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _apply_to_tensors

from booster_core.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


def return_no_views(module: nn.Module) -> None:
    """Let a module copy outputs that are views with a gradient; call this before ``fully_shard``."""
    module.register_forward_hook(_without_views)


def refuse_stale_backward(output: Any, version: Callable[[], object]) -> None:
    """Let backward through a unit's output raise if its parameters have changed since.

    Args:
        output: The unit's output, in any nesting.
        version: Returns a value that changes with the parameters.
    """
    if not torch.is_grad_enabled():
        return
    made_at = version()

    def check(gradient: Tensor) -> None:
        del gradient
        if version() != made_at:
            msg = (
                "The parameters were modified by an inplace operation, such as `optimizer.step()` or loading a "
                "checkpoint, after the forward that this backward goes through, so its gradients would be wrong. Run "
                "backward before the step, or forward again after it."
            )
            raise GradientError(msg)

    def watch(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(check)  # type: ignore[no-untyped-call]
        return tensor

    _apply_to_tensors(watch, output)


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args
    if not torch.is_grad_enabled():
        return None
    return _apply_to_tensors(_own, output)


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor  # noqa: SLF001 - the only way to ask
