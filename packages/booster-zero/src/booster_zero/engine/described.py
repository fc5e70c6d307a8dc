"""Which of torch's functions look at a tensor without reading values."""

from __future__ import annotations

from typing import Any

import torch

_VALUE_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that lead to its values; all others only describe it."""

_DESCRIPTIONS: frozenset[Any] = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.stride,
        torch.Tensor.element_size,
        torch.Tensor.storage_offset,
        torch.Tensor.untyped_storage,
        torch.Tensor.data_ptr,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_inference,
        torch.Tensor.is_conj,
        torch.Tensor.is_neg,
        torch.Tensor._is_view,  # noqa: SLF001 - torch.compile asks
        torch.Tensor.get_device,
        torch.Tensor.requires_grad_,
        torch.Tensor.register_hook,
        torch.Tensor.__len__,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_inference,
        torch.numel,
    }
)


def only_describes(func: Any) -> bool:
    """Return whether a torch function, or the getter of an attribute, reads no values of its tensors."""
    if func in _DESCRIPTIONS:
        return True
    owner = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__get__" and getattr(owner, "__name__", "") not in _VALUE_PROPERTIES
