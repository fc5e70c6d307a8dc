"""Attention of one block with its scores in memory, for what torch's fused kernels don't compute.

Those are soft caps, dropout on the CPU, and biases that are trained. Works in fp32 at least, on blocks whose size is
bounded, with the interface of `FusedKernel`.
Reference: Dao et al. 2022, "FlashAttention" (arXiv:2205.14135), for the backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from booster_hybrid.sequence_parallel.blocks import Block


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
