"""Functions of others that are stood in for while a context is open, because they ask for values on the way."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from booster_runtime.lazy.assignment import become_lazy
from booster_runtime.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_runtime.lazy.recorder import Recorder


@contextmanager
def substitutes(recorder: Recorder) -> Iterator[None]:
    """Let initialisers that loop be one operation each, and uninitialised parameters become lazy ones."""
    with _recorded_trunc_normal(recorder), _lazy_materialize():
        yield


@contextmanager
def _recorded_trunc_normal(recorder: Recorder) -> Iterator[None]:
    """Record initialisers that loop until their values fit as one operation each.

    Without this they would be right as well, but every turn of the loop would replay what its values depend on.
    """
    original: Any = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)
    if original is None:
        yield
        return

    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, LazyTensor):
            result: torch.Tensor = original(tensor, *args, **kwargs)
            return result
        recorder.record_call("torch.nn.init.trunc_normal_", original, tensor, *args, **kwargs)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


@contextmanager
def _lazy_materialize() -> Iterator[None]:
    """Let what ``nn.LazyLinear`` and its like make in a dry run be lazy: torch would rename its class afterwards."""
    original: Any = UninitializedTensorMixin.materialize

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        value = torch.empty(shape, device=device or self.data.device, dtype=dtype or self.data.dtype)
        if isinstance(value, LazyTensor):
            become_lazy(self, value)
        else:
            original(self, shape, device, dtype)

    UninitializedTensorMixin.materialize = materialize
    try:
        yield
    finally:
        UninitializedTensorMixin.materialize = original
