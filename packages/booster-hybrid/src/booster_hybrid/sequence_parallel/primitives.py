"""The fused attention operations of torch that return logarithms of sums, with one signature.

Not public functions of torch, but what `torch.nn.functional.scaled_dot_product_attention` calls.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

_aten: Any = torch.ops.aten
_EFFICIENT_ROWS = 32
"""Queries to a multiple of which the memory-efficient kernel pads logarithms."""


class Primitive(Protocol):
    """One operation, forward and backward.

    Queries, keys and values are of one size; ``bias`` is added to the scores; ``logarithms`` have shape
    ``(batch, heads, queries)``.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, is_causal: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and logarithms."""

    def backward(
        self,
        gradient: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        bias: Tensor | None,
        *,
        is_causal: bool,
        scaling: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values, from these, outputs and logarithms."""


class FlashOnCpu:
    """Flash attention on the CPU, with a bias or without; key/value heads may be shared."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, is_causal: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and logarithms."""
        outputs, logarithms = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scaling
        )
        return outputs, logarithms

    def backward(
        self,
        gradient: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        bias: Tensor | None,
        *,
        is_causal: bool,
        scaling: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *saved, 0.0, is_causal, attn_mask=bias, scale=scaling
        )
        return of_query, of_key, of_value


class FlashOnCuda:
    """Flash attention in half precision, without a bias."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, is_causal: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and logarithms."""
        assert bias is None, "flash attention adds none"
        key, value = _for_each_head(query, key, value)
        found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scaling)
        return found[0], found[1]

    def backward(
        self,
        gradient: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        bias: Tensor | None,
        *,
        is_causal: bool,
        scaling: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        del bias
        query, key, value, outputs, logarithms = saved
        keys, values = _for_each_head(query, key, value)
        lengths = query.shape[2], key.shape[2]
        # Where nothing is dropped, the states of the generator aren't read.
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, keys, values, outputs, logarithms.contiguous(), None, None, *lengths, 0.0, is_causal,
            *unused, scale=scaling,
        )  # fmt: skip
        return of_query, _over_shared(of_key, key), _over_shared(of_value, value)


class EfficientOnCuda:
    """Memory-efficient attention, with a bias or without."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, is_causal: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and logarithms."""
        key, value = _for_each_head(query, key, value)
        outputs, logarithms, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, compute_log_sumexp=True, dropout_p=0.0, is_causal=is_causal, scale=scaling
        )
        return outputs, logarithms[..., : query.shape[2]]

    def backward(
        self,
        gradient: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        bias: Tensor | None,
        *,
        is_causal: bool,
        scaling: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        query, key, value, outputs, logarithms = saved
        keys, values = _for_each_head(query, key, value)
        padded = nn.functional.pad(logarithms, (0, -query.shape[2] % _EFFICIENT_ROWS), value=math.inf).contiguous()
        unused = torch.zeros((), dtype=torch.int64, device=query.device)
        of_query, of_key, of_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, keys, values, bias, outputs, padded, unused, unused, 0.0,
            [True, True, True, False], is_causal, scale=scaling,
        )  # fmt: skip
        return of_query, _over_shared(of_key, key), _over_shared(of_value, value)


def primitive_for(query: Tensor, bias: Tensor | None) -> Primitive:
    """Return the operation for a device and a format, with what is added to the scores or without."""
    if query.device.type == "cpu":
        return FlashOnCpu()
    if bias is None and query.dtype != torch.float32:
        return FlashOnCuda()
    return EfficientOnCuda()


def _for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    share = query.shape[1] // key.shape[1]
    if share == 1:
        return key, value
    return key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)


def _over_shared(gradient: Tensor, of: Tensor) -> Tensor:
    """Return the sums over the query heads that share a key/value head."""
    share = gradient.shape[1] // of.shape[1]
    if share == 1:
        return gradient
    batch, _, length, size = gradient.shape
    return gradient.view(batch, -1, share, length, size).sum(2, dtype=torch.float32)
