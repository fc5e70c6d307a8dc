"""Functions of others that are stood in for while a context is open, because they ask for values on the way."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from booster_core.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_core.lazy.recorder import Recorder


@contextmanager
def substitutes(recorder: Recorder) -> Iterator[None]:
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
