"""Tensors that are views of a block of bytes while it can be computed with, and placeholders otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT_BYTES = 64


def assign(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor object have other memory, also of another device, to which ``.data`` can't always go."""
    if tensor.device.type == values.device.type:
        tensor.data = values
        return
    other = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def aligned(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a block, in which the next one begins at a multiple of 64."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def view_in(block: Tensor, like: Tensor, start: int) -> Tensor:
    """Return the part of a block of bytes that begins at ``start``, in the shape and format of another tensor."""
    end = start + like.numel() * like.element_size()
    return block[start:end].view(like.dtype).view(like.shape)


def placeholder(like: Tensor) -> Any:
    """Return a tensor of the same shape, format and device that takes one element of memory."""
    filler = float("nan") if like.is_floating_point() else 0
    return torch.full((), filler, dtype=like.dtype, device=like.device).expand(like.shape)
