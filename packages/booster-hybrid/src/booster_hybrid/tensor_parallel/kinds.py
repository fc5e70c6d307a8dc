"""Which modules compute a plain linear map, and how they store its weight: found by running them on random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_hybrid.layer_plan import ModulePatches
from booster_hybrid.probe.kinds import structural_key
from booster_hybrid.probe.values import restored

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

_SEED, _ROWS = 20191, 3
_found: dict[Hashable, bool | None] = {}
"""Answers of `_transposed`, by kind of module."""


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer keeps its weight as (inputs, outputs), as transformers' ``Conv1D`` does."""
    return _transposed(module) is True


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes a plain linear map of its weight and bias, in either storage order."""
    return _transposed(module) is not None


def _transposed(module: nn.Module) -> bool | None:
    """Return whether a linear layer keeps its weight as (inputs, outputs); ``None`` for other modules."""
    kind, own = type(module), module._parameters  # noqa: SLF001 - a computed weight is none of its parameters
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return False
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return None
    key = structural_key(module, None, {})
    if key not in _found:
        _found[key] = _tried(module, weight.shape, None if bias is None else bias.shape)
    return _found[key]


@torch.no_grad()
def _tried(module: nn.Module, shape: torch.Size, bias_shape: torch.Size | None) -> bool | None:
    generator = torch.Generator().manual_seed(_SEED)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    # Not its own transpose, and small, however large the weight is.
    weight = torch.randn(2 * shape[0] + shape[1], **options).as_strided(shape, (2, 1))
    bias = None if bias_shape is None else torch.randn(bias_shape, **options)
    changes = ModulePatches()
    changes.entry(module._parameters, "weight", weight)  # noqa: SLF001 - `setattr` refuses what is no parameter
    if bias is not None:
        changes.entry(module._parameters, "bias", bias)  # noqa: SLF001
    try:
        for is_transposed in (False, True):
            factor = weight.t() if is_transposed else weight
            source = torch.randn(_ROWS, factor.shape[1], **options)
            if (bias is None or len(bias) == len(factor)) and _computes(module, source, factor, bias):
                return is_transposed
    finally:
        changes.undo()
    return None


def _computes(module: nn.Module, source: Tensor, factor: Tensor, bias: Tensor | None) -> bool:
    try:
        with restored(module, source.device):
            found = type(module).forward(module, source)
    except Exception:  # noqa: BLE001 - the layer has other inputs, or is another one
        return False
    expected = nn.functional.linear(source, factor, bias)
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False  # routers, for one, compute in fp32
    return torch.allclose(found, expected)
