"""Cross entropy over logits whose vocabulary is split over ranks: the whole logits never exist.

Three numbers per token travel: the largest logit, the sum of exponentials, and the label's logit.
Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core import collectives

if TYPE_CHECKING:
    from torch import Tensor

    from booster_hybrid.tensor_parallel.group import TensorGroup


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, is_counted: Tensor, first: int, group: TensorGroup) -> Tensor:
        values = logits.float()
        largest = values.amax(-1)
        collectives.all_reduce(largest, dist.ReduceOp.MAX, group.group).wait()
        shifted = values - largest.unsqueeze(-1)
        local = labels - first
        is_elsewhere = (local < 0) | (local >= logits.shape[-1])
        index = local.masked_fill(is_elsewhere, 0).unsqueeze(-1)
        chosen = shifted.gather(-1, index).squeeze(-1).masked_fill(is_elsewhere, 0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), chosen])
        collectives.all_reduce(sums, group=group.group).wait()
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), index, is_elsewhere, is_counted)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(~is_counted, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, index, is_elsewhere, is_counted = ctx.saved_tensors
        weight = gradient.masked_fill(~is_counted, 0)
        of_logits = softmax * weight.unsqueeze(-1)
        of_label = weight.masked_fill(is_elsewhere, 0).unsqueeze(-1)
        of_logits.scatter_add_(-1, index, -of_label)
        return of_logits.to(ctx.dtype), None, None, None, None


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
