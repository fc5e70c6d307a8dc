"""Attention of one block of queries and keys, with the logarithm of each query's sum of exponentials.

With it, what a query finds in two blocks of keys can be merged in fp32, and a backward that is given the merged outputs
and logarithms computes the gradients of each block as part of the whole. torch's fused operations return it, so that no
scores are ever in memory; they are no public functions of torch, but what
`torch.nn.functional.scaled_dot_product_attention` and torch's context parallelism call. What they don't compute (soft
caps, dropout on the CPU, biases that are trained) has its scores in memory, for blocks of bounded size.
Reference: Dao et al. 2022, "FlashAttention" (arXiv:2205.14135), for the backward.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_hybrid.sequence_parallel.mask import Block

if TYPE_CHECKING:
    from torch import Tensor

    _Place = tuple[slice, slice, slice]


_aten: Any = torch.ops.aten
_EFFICIENT_ROWS = 32
"""Queries to a multiple of which the memory-efficient kernel pads logarithms."""


def operation_for(query: Tensor, bias: Tensor | None) -> str:
    """Return which of torch's operations attends, with what is added to the scores or without.

    ``"cpu"`` is flash attention there, with a bias or without, whose key/value heads may be shared; ``"flash"`` is that
    of CUDA, in half precision and without a bias, and ``"efficient"`` its memory-efficient attention.
    """
    if query.device.type == "cpu":
        return "cpu"
    return "flash" if bias is None and query.dtype != torch.float32 else "efficient"


def attend(
    operation: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return outputs and logarithms, the latter of shape ``(batch, heads, queries)``.

    Args:
        operation: As `operation_for` says it.
        query: Of one size with the next two.
        key: The keys.
        value: The values.
        bias: Added to the scores; none under ``"flash"``.
        is_causal: Whether queries see the keys up to their own place.
        scaling: Multiplies the products.
    """
    if operation == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scaling
        )
        return found[0], found[1]
    key, value = _for_each_head(query, key, value)
    if operation == "flash":
        found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scaling)
        return found[0], found[1]
    outputs, logarithms, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, compute_log_sumexp=True, dropout_p=0.0, is_causal=is_causal, scale=scaling
    )
    return outputs, logarithms[..., : query.shape[2]]


def differentiate(
    operation: str,
    gradient: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    bias: Tensor | None,
    *,
    is_causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given these, the outputs and the logarithms; see `attend`."""
    query, key, value, outputs, logarithms = saved
    if operation == "cpu":
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *saved, 0.0, is_causal, attn_mask=bias, scale=scaling
        )
        return of_query, of_key, of_value
    keys, values = _for_each_head(query, key, value)
    if operation == "flash":
        # Where nothing is dropped, the states of the generator aren't read.
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, keys, values, outputs, logarithms.contiguous(), None, None, query.shape[2], key.shape[2],
            0.0, is_causal, *unused, scale=scaling,
        )  # fmt: skip
    else:
        padded = nn.functional.pad(logarithms, (0, -query.shape[2] % _EFFICIENT_ROWS), value=math.inf).contiguous()
        unread = torch.zeros((), dtype=torch.int64, device=query.device)
        of_query, of_key, of_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, keys, values, bias, outputs, padded, unread, unread, 0.0,
            [True, True, True, False], is_causal, scale=scaling,
        )  # fmt: skip
    return of_query, _over_shared(of_key, key), _over_shared(of_value, value)


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


@dataclass(frozen=True)
class ExplicitScores:
    """Attention of one block, step by step.

    Args:
        scaling: Multiplies the products.
        softcap: Bound of the scores, which a hyperbolic tangent keeps; ``None`` for none.
        dropout: Probability of dropping an attention weight.
        seed: What this rank's dropout is drawn from, again in backward.
        needs_bias_gradient: Whether backward returns the gradients of what is added to the scores.
    """

    scaling: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    needs_bias_gradient: bool = False
    is_cut = True
    """Whether blocks must be small."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, block: Block
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and logarithms of sums; see `FusedKernel.forward`."""
        work = torch.promote_types(query.dtype, torch.float32)
        query, key, value = query.to(work), key.to(work), value.to(work)
        scores, _ = self._scores(query, key, mask, block)
        logarithms = scores.logsumexp(-1)
        # Where nothing is seen, any finite number will do.
        weights = scores.sub_(_finite(logarithms).unsqueeze(-1)).exp_()
        kept = _by_group(self._dropped(weights, block), value.shape[1])
        return (kept @ value).view(*query.shape[:-1], value.shape[-1]), logarithms

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of queries, keys, values and, where needed, of what is added to the scores."""
        work = torch.promote_types(query.dtype, torch.float32)
        query, key, value = query.to(work), key.to(work), value.to(work)
        gradient, outputs = gradient.to(work), outputs.to(work)
        heads = key.shape[1]
        scores, slope = self._scores(query, key, mask, block)
        weights = scores.sub_(logarithms.unsqueeze(-1)).exp_()
        incoming = _by_group(gradient, heads)
        of_value = _by_group(self._dropped(weights, block), heads).transpose(-1, -2) @ incoming
        of_kept = (incoming @ value.transpose(-1, -2)).view(weights.shape)
        shared = (gradient * outputs).sum(-1, keepdim=True)
        of_added = weights.mul_(self._dropped(of_kept, block).sub_(shared))
        of_bias = of_added.clone() if self.needs_bias_gradient else None
        if slope is not None:
            of_added = of_added.mul_(slope)
        of_scores = _by_group(of_added.mul_(self.scaling), heads)
        of_query = (of_scores @ key).view(query.shape)
        of_key = of_scores.transpose(-1, -2) @ _by_group(query, heads)
        return of_query, of_key, of_value, of_bias

    def _scores(self, query: Tensor, key: Tensor, mask: Tensor | None, block: Block) -> tuple[Tensor, Tensor | None]:
        """Return the masked scores of a block, shape ``(batch, heads, queries, keys)``.

        The second are, where scores are capped, their derivatives by the products.
        """
        scores = (_by_group(query, key.shape[1]) @ key.transpose(-1, -2)).view(*query.shape[:-1], key.shape[2])
        scores = scores.mul_(self.scaling)
        slope = None
        if self.softcap is not None:
            bounded = scores.div_(self.softcap).tanh_()
            slope = 1.0 - bounded.square()
            scores = bounded.mul_(self.softcap)
        if mask is not None:
            scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
        if block.kind == "causal":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            scores = scores.masked_fill_(hidden, -math.inf)
        return scores, slope

    def _dropped(self, weights: Tensor, block: Block) -> Tensor:
        """Return the weights of a block with some of them dropped, the same ones in both passes."""
        if not self.dropout:
            return weights
        generator = torch.Generator(weights.device).manual_seed((self.seed + block.number) % 2**62)
        kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= self.dropout
        return weights * kept / (1.0 - self.dropout)


def _finite(logarithms: Tensor) -> Tensor:
    return logarithms.masked_fill(logarithms == -math.inf, 0.0)


def _by_group(tensor: Tensor, num_key_value_heads: int) -> Tensor:
    """Stack the rows of the heads that share a key/value head: ``(batch, key/value heads, rows, columns)``."""
    return tensor.reshape(tensor.shape[0], num_key_value_heads, -1, tensor.shape[-1])


class MergedOutputs:
    """What queries have found in the blocks so far.

    Args:
        query: The queries, shape ``(batch, heads, queries, size)``.
        value_size: Size of the outputs.
    """

    def __init__(self, query: Tensor, value_size: int) -> None:
        self._query, self._value_size = query, value_size
        self._format = sum_format(query)
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, rows: _Place, outputs: Tensor, logarithms: Tensor) -> None:
        """Merge what some of the queries have found in a block; may take the tensors over.

        Args:
            rows: Which of the queries.
            outputs: Shape ``(batch, heads, queries, value size)``.
            logarithms: Of the sums of exponentials, shape ``(batch, heads, queries)``.
        """
        outputs, logarithms = outputs.to(self._format), logarithms.to(self._format)
        if self._found is None and outputs.shape[:-1] == self._query.shape[:-1]:
            self._found = outputs, logarithms
            return
        merged, total = self._whole()
        merged, total = merged[rows], total[rows]
        # A sigmoid of the difference is the block's share of the weights; of two that saw nothing, none.
        share = (logarithms - total).sigmoid_().nan_to_num_(0.0)
        merged.lerp_(outputs, share.unsqueeze(-1))
        torch.logaddexp(total, logarithms, out=total)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs in the queries' format, and the logarithms of all sums, for backward.

        Args:
            sinks: Scores that take weight and have no value, shape ``(heads,)``; ``None`` for none.

        Returns:
            Zeros, and an infinite logarithm, for queries that have seen nothing: all weights are zero in backward.
        """
        merged, total = self._whole()
        if sinks is not None:
            sink = sinks.to(self._format).view(1, -1, 1)
            merged = merged * (total - sink).sigmoid().unsqueeze(-1)
            total = torch.logaddexp(total, sink)
        return merged.to(self._query.dtype), total.masked_fill(total == -math.inf, math.inf)

    def _whole(self) -> tuple[Tensor, Tensor]:
        if self._found is None:
            shape = self._query.shape[:-1]
            zeros = self._query.new_zeros(*shape, self._value_size, dtype=self._format)
            self._found = zeros, self._query.new_full(shape, -math.inf, dtype=self._format)
        return self._found


def sum_format(tensor: Tensor) -> torch.dtype:
    """Return the format in which what is added up of a tensor is kept: fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def sink_gradient(sinks: Tensor, gradient: Tensor, outputs: Tensor, logarithms: Tensor) -> Tensor:
    """Return the gradient of scores that take weight and have no value.

    Args:
        sinks: The scores, shape ``(heads,)``.
        gradient: That of the outputs.
        outputs: What the queries have found.
        logarithms: Of the sums of all weights, the sinks' included.
    """
    shared = (gradient.to(logarithms.dtype) * outputs).sum(-1)
    weights = (sinks.to(logarithms.dtype).view(1, -1, 1) - logarithms).exp_()
    return weights.mul_(shared).sum((0, 2)).neg_().to(sinks.dtype)


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
        outputs, logarithms = attend(
            operation_for(query, bias), query, key, value, bias, is_causal=is_causal, scaling=self.scaling
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
        saved = query, key, value, outputs, logarithms
        found = differentiate(
            operation_for(query, bias), gradient, saved, bias, is_causal=is_causal, scaling=self.scaling
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
