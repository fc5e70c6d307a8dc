"""What a rank gets from a collective in which every rank does the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

SMALL_NUMEL = 1 << 14
"""Operations run where neither their arguments nor their results have more elements."""
ANSWERED_NUMEL = 1 << 16
"""Larger buffers get no values: nothing that a plan reads is so large."""


def times(tensor: Tensor, op: Any, size: int) -> Tensor:
    """Multiply a tensor by the number of ranks, where the operation is a sum, and return it."""
    if op == dist.ReduceOp.SUM:
        tensor.mul_(size)
    return tensor


def repeat_into(out: Tensor, source: Tensor) -> None:
    """Fill a tensor with copies of another one."""
    if source.numel():
        flat = out.reshape(-1, source.numel()) if out.numel() % source.numel() == 0 else None
        if flat is not None:
            out.copy_(source.reshape(1, -1).expand_as(flat).reshape(out.shape))
