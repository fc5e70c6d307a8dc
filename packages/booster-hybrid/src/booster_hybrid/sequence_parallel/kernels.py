"""torch's fused attention kernels, which return the logarithm of each query's sum of exponentials.

With it, what a query finds in two blocks of keys can be merged, and the backward kernel, given the merged outputs and
logarithms, computes the gradients of each block as part of the whole. So no scores are ever in memory.
Reference: torch's context parallelism, ``torch.distributed.tensor.experimental``, calls the same kernels.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster_hybrid.sequence_parallel.blocks import Block
from booster_hybrid.sequence_parallel.explicit_scores import ExplicitScores
from booster_hybrid.sequence_parallel.merging import MergedOutputs
from booster_hybrid.sequence_parallel.primitives import primitive_for

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 8
"""Elements to a multiple of which CUDA's kernels need sizes, and the rows of what is added."""


@dataclass(frozen=True)
class FusedKernel:
    """Attention of one block by one of torch's fused operations.

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
        """
        size = value.shape[-1]
        query, key, value = _of_one_size(query, key, value)
        bias = None if mask is None else _added(mask, query)
        is_causal = block.kind == "causal" and mask is None  # a mask knows
        outputs, logarithms = primitive_for(query, bias).forward(
            query, key, value, bias, is_causal=is_causal, scaling=self.scaling
        )
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
        """
        sizes = query.shape[-1], key.shape[-1], value.shape[-1]
        query, key, value, outputs, gradient = _of_one_size(query, key, value, outputs, gradient)
        bias = None if mask is None else _added(mask, query)
        is_causal = block.kind == "causal" and mask is None  # a mask knows
        found = primitive_for(query, bias).backward(
            gradient,
            (query, key, value, outputs, logarithms),
            bias,
            is_causal=is_causal,
            scaling=self.scaling,
        )
        of_query, of_key, of_value = (each[..., :size] for each, size in zip(found, sizes, strict=True))
        return of_query, of_key, of_value, None


def can_fuse(query: Tensor, *, dropout: float, softcap: float | None, needs_bias_gradient: bool) -> bool:
    """Return whether torch's kernels compute this attention.

    Args:
        query: The queries.
        dropout: Probability of dropping a weight: the CPU's kernel drops none.
        softcap: Bound of the scores, which they don't know.
        needs_bias_gradient: Whether something added to the scores is trained.
    """
    if dropout or softcap is not None or needs_bias_gradient:
        return False
    if query.device.type == "cpu":
        return query.is_floating_point()
    is_known = query.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and is_known and _is_trusted(query.device, query.dtype)


@lru_cache
def _is_trusted(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels of a device are used; warn once where they are not."""
    agrees = agrees_with_definition(device, dtype)
    if not agrees:
        msg = (
            f"torch's attention kernels for {dtype} on {device} give other results than their definition, so attention "
            "over split sequences computes its scores explicitly, which is right but several times slower. Please "
            "report this with the output of `booster env`."
        )
        warnings.warn(msg, RuntimeWarning, stacklevel=2)
    return agrees


@lru_cache
def agrees_with_definition(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels, merged over two blocks of keys, give what explicit scores give; asked once.

    The operations are no public functions of torch, so that conventions may differ between versions and devices.

    Args:
        device: Where the kernels run.
        dtype: Format of the inputs.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (torch.randn(1, 2, 48, 16, generator=generator).to(device, dtype) for _ in range(4))
    hidden = torch.ones(24, 24, dtype=torch.bool, device=device).triu_(1).expand(1, 1, 24, 24)
    results = []
    for kernel in (FusedKernel(0.25), ExplicitScores(0.25)):
        rows, keys = query[:, :, 24:], (slice(0, 24), slice(24, 48))
        parts = [
            (each, Block(slice(None), slice(0, 24), each, kind, (0, 0), (0, 0), 0), mask)
            for each, kind, mask in zip(keys, ("all", "some"), (None, ~hidden), strict=True)
        ]
        merged = MergedOutputs(rows, 16)
        for span, block, mask in parts:
            found = kernel.forward(rows, key[:, :, span], value[:, :, span], mask, block)
            merged.add((slice(None), slice(None), slice(None)), *found)
        outputs, logarithms = merged.result(None)
        gradients = [
            kernel.backward(
                gradient[:, :, 24:], rows, key[:, :, span], value[:, :, span], outputs, logarithms, mask, block
            )[:3]
            for span, block, mask in parts
        ]
        results.append([outputs, *(each for found in gradients for each in found)])
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    return all(
        bool((ours.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max())
        for ours, theirs in zip(*results, strict=True)
    )


def _of_one_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Fill up with zeros what is smaller: these add nothing to products, and zeros to outputs."""
    size = max(each.shape[-1] for each in tensors)
    size += 0 if tensors[0].device.type == "cpu" else -size % _ALIGNMENT
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
    excess = -bias.shape[-1] % _ALIGNMENT
    padded = nn.functional.pad(bias, (0, excess))[..., : bias.shape[-1]] if excess else bias
    return padded.expand(query.shape[0], query.shape[1], query.shape[2], -1)
