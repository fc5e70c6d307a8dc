"""torch's fused attention kernels, which return the logarithm of each query's sum of exponentials.

With it, what a query finds in two blocks of keys can be merged, and the backward kernel, given the merged outputs and
logarithms, computes the gradients of each block as part of the whole. So no scores are ever in memory.
Reference: torch's context parallelism, ``torch.distributed.tensor.experimental``, calls the same kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from booster_hybrid.sequence_parallel.blocks import Block

_aten: Any = torch.ops.aten
_EFFICIENT_ALIGNMENT = 8
"""Elements to which rows of masks are aligned for the memory-efficient kernel."""
_EFFICIENT_ROWS = 32
"""Queries to which the memory-efficient kernel pads its logarithms."""


@dataclass(frozen=True)
class FusedKernel:
    """Attention of one block by torch's flash attention, or where that can't, memory-efficient attention.

    Args:
        scaling: Multiplies the products.
    """

    scaling: float
    is_cut = False
    """Whether blocks must be small."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, block: Block
    ) -> tuple[Tensor, Tensor]:
        """Return what the queries of a block find among its keys.

        Args:
            query: Shape ``(batch, heads, queries, size)``.
            key: Shape ``(batch, key/value heads, keys, size)``.
            value: Likewise; its size may be another.
            mask: Broadcasts to the scores: what may be seen, or what is added; ``None`` for nothing.
            block: Says whether it is causal.

        Returns:
            Outputs, and the logarithms of the sums of exponentials, shape ``(batch, heads, queries)``.

        Collective: none.
        """
        size = value.shape[-1]
        query, key, value = _of_one_size(query, key, value)
        bias = None if mask is None else _added(mask, query)
        is_causal = block.kind == "causal" and mask is None  # a mask knows
        call = _flash_cpu if query.device.type == "cpu" else _cuda_kernel(query, key, value, bias, is_causal)
        outputs, logarithms = call(query, key, value, bias, is_causal, self.scaling)
        if bias is not None:
            # Kernels differ in what they return for a query that sees nothing.
            is_blind = (bias == -math.inf).all(-1)
            outputs = outputs.masked_fill(is_blind.unsqueeze(-1), 0.0)
            logarithms = logarithms.masked_fill(is_blind, -math.inf)
        return outputs[..., :size], logarithms

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        outputs: Tensor,
        logarithms: Tensor,
        mask: Tensor | None,
        block: Block,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of queries, keys and values of a block; see `forward`.

        Args:
            gradient: That of the outputs.
            query: As above.
            key: As above.
            value: As above.
            outputs: What the queries find among all keys.
            logarithms: Those of all keys; infinite for queries that see nothing.
            mask: As above.
            block: As above.

        Collective: none.
        """
        sizes = query.shape[-1], key.shape[-1], value.shape[-1]
        query, key, value, outputs, gradient = _of_one_size(query, key, value, outputs, gradient)
        bias = None if mask is None else _added(mask, query)
        is_causal = block.kind == "causal" and mask is None  # a mask knows
        saved = (gradient, query, key, value, outputs, logarithms, bias, is_causal, self.scaling)
        if query.device.type == "cpu":
            found = _flash_cpu_backward(*saved)
        elif _cuda_kernel(query, key, value, bias, is_causal) is _flash_cuda:
            found = _flash_cuda_backward(*saved)
        else:
            found = _efficient_backward(*saved)
        of_query, of_key, of_value = (each[..., :size] for each, size in zip(found, sizes, strict=True))
        return of_query, of_key, of_value, None


def can_fuse(query: Tensor, *, dropout: float, softcap: float | None, needs_bias_gradient: bool) -> bool:
    """Return whether torch's kernels compute this attention.

    Args:
        query: The queries.
        dropout: Probability of dropping a weight: kernels for the CPU drop none.
        softcap: Bound of the scores, which they don't know.
        needs_bias_gradient: Whether something added to the scores is trained.
    """
    if dropout or softcap is not None or needs_bias_gradient:
        return False
    is_known = query.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return query.device.type in ("cpu", "cuda") and (is_known or query.device.type == "cpu")


def _of_one_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Fill up with zeros what is smaller: these add nothing to products, and zeros to outputs."""
    size = max(each.shape[-1] for each in tensors)
    return tuple(
        # Kernels need the last dimension to be dense.
        (each if each.stride(-1) == 1 else each.contiguous())
        if each.shape[-1] == size
        else nn.functional.pad(each, (0, size - each.shape[-1]))
        for each in tensors
    )


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Return what a mask adds to scores, as kernels take it."""
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    else:
        is_wide = query.device.type == "cpu" and mask.dtype == torch.float32 and query.dtype != torch.float64
        bias = mask if is_wide else mask.to(query.dtype)
    if query.device.type == "cpu":
        return bias
    excess = -bias.shape[-1] % _EFFICIENT_ALIGNMENT
    padded = nn.functional.pad(bias, (0, excess))[..., : bias.shape[-1]] if excess else bias
    return padded.expand(query.shape[0], query.shape[1], query.shape[2], -1)


def _flash_cpu(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    outputs, logarithms = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scaling
    )
    return outputs, logarithms


def _flash_cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    outputs: Tensor,
    logarithms: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, outputs, logarithms, 0.0, is_causal, attn_mask=bias, scale=scaling
    )
    return found
