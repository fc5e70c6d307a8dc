"""Cross entropy over logits whose vocabulary is split over ranks: the whole logits never exist.

Three numbers per token travel: the largest logit, the sum of exponentials, and the label's logit.
They travel in one collective. Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_hybrid.tensor_parallel.bounds import within_bounds
from booster_hybrid.tensor_parallel.collectives import refuse_second_derivative
from booster_hybrid.tensor_parallel.eager import outside_of_graphs
from booster_runtime.memory import block_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup


_BLOCK_BYTES, _DEVICE_BLOCK_BYTES = 1 << 20, 1 << 26
"""Tokens are worked on in blocks of about this size: what is made on the way stays in a CPU's cache, and is small."""


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and two numbers per token; the softmax is recomputed in backward, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        is_counted: Tensor,
        first: int,
        group: RankGroup,
        spread: float,
        num_classes: int,
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        local = labels - first
        is_elsewhere = (local < 0) | (local >= logits.shape[-1])
        index = local.masked_fill_(is_elsewhere, 0).unsqueeze(-1)
        num_tokens = labels.numel()
        terms = torch.empty((group.size, 3, num_tokens), dtype=dtype, device=logits.device)
        own = terms[group.rank]
        for block in _blocks(logits):
            values = logits[block].to(dtype)
            # Where all logits are -inf, so would be their differences to it not be numbers.
            largest = values.amax(-1).clamp_(min=torch.finfo(dtype).min)
            own[0, block] = largest
            own[1, block] = (values - largest.unsqueeze(-1)).exp_().sum(-1)
            if spread:
                own[2, block] = values.sum(-1) * (spread / num_classes)
        of_label = logits.gather(-1, index).squeeze(-1).masked_fill(is_elsewhere, 0)
        own[2] = own[2].add_(of_label, alpha=1 - spread) if spread else of_label
        bounds = [rank * 3 * num_tokens for rank in range(group.size + 1)]
        group.all_gather(terms.view(-1), bounds).wait()
        # Kept apart from the largest logit: added to a large one they would lose the small differences.
        largest = terms[:, 0].amax(0)
        normalizer = (terms[:, 1] * (terms[:, 0] - largest).exp_()).sum(0).log_()
        ctx.spread, ctx.num_classes = spread, num_classes
        ctx.save_for_backward(logits, largest, normalizer, index, is_elsewhere, is_counted)
        return (normalizer - (terms[:, 2].sum(0) - largest)).masked_fill(~is_counted, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        logits, largest, normalizer, index, is_elsewhere, is_counted = ctx.saved_tensors
        weight = gradient.masked_fill(~is_counted, 0).unsqueeze(-1)
        of_label = -weight.masked_fill(is_elsewhere.unsqueeze(-1), 0) * (1 - ctx.spread)
        of_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for block in _blocks(logits):
            shifted = logits[block] - largest[block].unsqueeze(-1)
            softmax = shifted.sub_(normalizer[block].unsqueeze(-1)).exp_()
            if ctx.spread:
                softmax.sub_(ctx.spread / ctx.num_classes)
            softmax.mul_(weight[block]).scatter_add_(-1, index[block], of_label[block])
            of_logits[block] = softmax
        return of_logits, None, None, None, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    nbytes = block_bytes(logits.device, _BLOCK_BYTES, _DEVICE_BLOCK_BYTES)
    step = max(nbytes // (max(logits.shape[-1], 1) * 4), 1)
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


@outside_of_graphs
def vocabulary_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    first: int,
    group: RankGroup,
    *,
    num_classes: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return each token's cross entropy, the same on every rank; 0 for ignored tokens.

    Args:
        logits: Shape ``(tokens, local vocabulary)``.
        labels: Shape ``(tokens,)``, indices of the whole vocabulary.
        first: Index of the first local logit in the whole vocabulary.
        group: The tensor parallel ranks.
        num_classes: Length of the whole vocabulary.
        ignore_index: Label of tokens that don't count.
        label_smoothing: Share of each label that is spread evenly over the vocabulary.

    Raises:
        IndexError: If a label that counts is in nobody's part, on every rank; see `within_bounds`.

    Collective: the group.
    """
    is_counted = labels != ignore_index
    known = within_bounds(labels.masked_fill(~is_counted, 0), num_classes, "Target")
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, known, is_counted, first, group, label_smoothing, num_classes
    )
    return losses
