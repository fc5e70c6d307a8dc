"""Units whose output is a view get a copy of it in place of the view.

torch gathers a unit for backward by a hook on its output. Where the output is a view, as that of a linear layer over
three dimensions is, an in-place operation on it (``x += y``) drops the hook, and with it the gradients of the unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _apply_to_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn


def return_no_views(module: nn.Module) -> None:
    """Let a module copy what it returns as a view with a gradient; to be called before ``fully_shard``.

    Collective: none.
    """
    module.register_forward_hook(_without_views)


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args
    if not torch.is_grad_enabled():
        return None
    return _apply_to_tensors(_own, output)


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor  # noqa: SLF001 - the only way to ask
