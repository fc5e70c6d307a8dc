"""Attention as it is defined, with the whole matrix of scores, to compare kernels and split sequences with."""

import math

import torch


def attention_as_defined(query, key, value, *, scaling=None, bias=None, mask=None, sinks=None, softcap=None):
    """Return what queries find, zeros where they see nothing.

    Args:
        query: Shape ``(batch, heads, positions, size)``.
        key: The same with as many heads, or fewer that divide them, and positions of its own, like ``value``.
        value: Its size may be another.
        scaling: Of scores; one over the root of the size by default.
        bias: Added to scores, which ``softcap`` has capped.
        mask: What is seen, or what is added.
        sinks: For each head a score that takes weight and gives nothing.
        softcap: Largest score.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (scaling or 1 / math.sqrt(query.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return weights[..., : key.shape[2]] @ value
