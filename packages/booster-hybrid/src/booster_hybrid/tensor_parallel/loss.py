"""Cross entropy over logits whose vocabulary is split over ranks: the whole logits never exist.

Two numbers per token travel, once: the logarithm of the sum of exponentials, and the label's logit.
Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3, which sends three, in two rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core import collectives
from booster_hybrid.tensor_parallel.collectives import refuse_second_derivative
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from torch import Tensor

    from booster_hybrid.tensor_parallel.group import TensorGroup


_BLOCK_BYTES, _DEVICE_BLOCK_BYTES = 1 << 20, 1 << 26
"""Tokens are worked on in blocks of about this size: what is made on the way stays in a CPU's cache, and is small."""


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and two numbers per token; the softmax is taken anew in backward, block by block."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, is_counted: Tensor, first: int, group: TensorGroup) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        local = labels - first
        is_elsewhere = (local < 0) | (local >= logits.shape[-1])
        index = local.masked_fill_(is_elsewhere, 0).unsqueeze(-1)
        num_tokens = labels.numel()
        terms = torch.empty((group.size, 2, num_tokens), dtype=dtype, device=logits.device)
        own = terms[group.rank]
        for block in _blocks(logits):
            own[0, block] = logits[block].to(dtype).logsumexp(-1)
        own[1] = logits.gather(-1, index).squeeze(-1).masked_fill(is_elsewhere, 0)
        bounds = [rank * 2 * num_tokens for rank in range(group.size + 1)]
        collectives.all_gather(terms.view(-1), bounds, group.group).wait()
        normalizer = terms[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, normalizer, index, is_elsewhere, is_counted)
        return (normalizer - terms[:, 1].sum(0)).masked_fill(~is_counted, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative()
        logits, normalizer, index, is_elsewhere, is_counted = ctx.saved_tensors
        weight = gradient.masked_fill(~is_counted, 0).unsqueeze(-1)
        of_label = -weight.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        of_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for block in _blocks(logits):
            softmax = (logits[block] - normalizer[block].unsqueeze(-1)).exp_()
            softmax.mul_(weight[block]).scatter_add_(-1, index[block], of_label[block])
            of_logits[block] = softmax
        return of_logits, None, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    nbytes = _BLOCK_BYTES if logits.device.type == "cpu" else _DEVICE_BLOCK_BYTES
    step = max(nbytes // (max(logits.shape[-1], 1) * 4), 1)
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


@outside_of_graphs
def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, first: int, group: TensorGroup, *, ignore_index: int = -100
) -> Tensor:
    """Return each token's cross entropy, the same on every rank; 0 for ignored tokens.

    Args:
        logits: Shape ``(tokens, local vocabulary)``.
        labels: Shape ``(tokens,)``, indices of the whole vocabulary.
        first: Index of the first local logit in the whole vocabulary.
        group: The tensor parallel ranks.
        ignore_index: Label of tokens that don't count.

    Collective: the group.
    """
    is_counted = labels != ignore_index
    known = labels.masked_fill(~is_counted, 0)
    losses: Tensor = _CrossEntropy.apply(logits, known, is_counted, first, group)  # type: ignore[no-untyped-call]
    return losses
