"""``real.data = lazy`` while a context is open: a tensor that was made before, or elsewhere, becomes a lazy one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from booster_core.errors import LazyInitError
from booster_runtime.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_KINDS = (torch.Tensor, nn.Parameter)


class Assignments(TorchFunctionMode):
    """Sees assignments to ``data`` of real tensors; those of lazy ones go through `LazyTensor.data`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func == _SET_DATA and isinstance(args[1], LazyTensor) and not isinstance(args[0], LazyTensor):
            return become_lazy(args[0], args[1])
        return func(*args, **(kwargs or {}))


def become_lazy(real: Tensor, value: LazyTensor) -> None:
    """Let a real tensor object be a lazy one from now on, another view of the storage of ``value``.

    Raises:
        LazyInitError: If the tensor has gradients, hooks, weak references or a class of its own.

    Collective: none.
    """
    holds = [name for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if getattr(real, name, None)]
    if real.grad is not None:
        holds.append("grad")
    is_plain = type(real) in _KINDS or isinstance(real, UninitializedTensorMixin)
    problem = "" if is_plain else f"it is a `{type(real).__name__}`"
    if holds:
        problem = f"it has `{holds[0]}`"
    if not problem:
        lazy = value.detach()
        lazy.requires_grad_(real.requires_grad)
        lazy.__dict__.update(real.__dict__)
        if isinstance(real, nn.Parameter):
            lazy._is_param = True  # noqa: SLF001 - how torch marks parameters
        try:
            torch.utils.swap_tensors(real, lazy)  # type: ignore[no-untyped-call]
        except RuntimeError as cause:
            problem = str(cause)
    if problem:
        msg = (
            f"`.data` of a real tensor was set to a lazy one of shape {tuple(value.shape)}, and can't become lazy: "
            f"{problem.rstrip('. ')}. Make both inside of one `LazyInitContext`, or both outside."
        )
        raise LazyInitError(msg)
