"""Attention over split sequences gives what torch's own gives on one process, forward and backward, in fp64."""

from __future__ import annotations

import torch
import torch.distributed as dist
from defined_attention import attention_as_defined
from matrix import matrix
from ranked import on_ranks
from torch import nn

from booster_hybrid.mesh import RankGroup
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.sequence_parallel.mask import Visibility, make_mask
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention
from booster_hybrid.sequence_parallel.ulysses import all_to_all_attention

BATCH, SIZE, VALUE_SIZE = 3, 4, 5


def inputs(heads, key_heads, length):
    generator = torch.Generator().manual_seed(length)
    shapes = [
        (BATCH, heads, length, SIZE),
        (BATCH, key_heads, length, SIZE),
        (BATCH, key_heads, length, VALUE_SIZE),
        (BATCH, heads, length, VALUE_SIZE),
    ]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def mask_for(kind, length):
    """Return a mask as a model makes it, the tensor that it stands for, and whether there is none but causality."""
    if kind == "causal":
        return None, None, True
    if kind == "none":
        return None, None, False
    if kind == "tensor":
        values = torch.randn(BATCH, 1, length, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return values, values, False
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )

    rule = {
        "padded": bidirectional_mask_function,
        "padded_causal": causal_mask_function,
        "sliding": sliding_window_causal_mask_function(3),
    }[kind]
    padding = torch.ones(BATCH, length, dtype=torch.bool)
    if kind != "sliding":
        padding[0, : length // 2] = False
        padding[1, length - length // 3 :] = False
    sizes = {"batch_size": BATCH, "q_length": length, "kv_length": length}
    rules = {"mask_function": rule, "attention_mask": padding, "local_size": 3 if kind == "sliding" else None}
    made = make_mask(**sizes, **rules, allow_is_causal_skip=kind != "padded")
    return made, sdpa_mask(**sizes, **rules, allow_is_causal_skip=False), False


def attends(mode, heads, key_heads, length, kind):
    group = RankGroup.of(None)
    layout = SequenceLayout(length, group.size, zigzag=mode == "ring_attn")
    mask, tensor, is_causal = mask_for(kind, length)
    whole = [each.requires_grad_() for each in inputs(heads, key_heads, length)]
    query, key, value, weights = whole
    expected = nn.functional.scaled_dot_product_attention(
        query, key, value, tensor, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    (expected * weights).sum().backward()
    local = [layout.take(each.detach(), 2, group.rank).clone().requires_grad_() for each in whole]
    attend = ring_attention if mode == "ring_attn" else all_to_all_attention
    call = AttentionCall(Visibility(mask, is_causal=is_causal), layout, group, scaling=0.3)
    found = attend(*local[:3], call)
    torch.testing.assert_close(found, layout.take(expected, 2, group.rank).detach())
    (found * local[3]).sum().backward()
    for ours, theirs in zip(local, whole, strict=True):
        torch.testing.assert_close(ours.grad, layout.take(theirs.grad, 2, group.rank))


@matrix(
    ["1-2-2-5-all_to_all"],
    **{
        "num_ranks, heads, key_heads, length": [
            (1, 2, 2, 5),
            (2, 4, 2, 16),
            (2, 4, 1, 13),
            (2, 2, 2, 1),
            (3, 6, 2, 17),
            (4, 4, 2, 9),
            (4, 8, 8, 3),
        ]
    },
    mode=["all_to_all", "ring_attn"],
)
@on_ranks("num_ranks")
def test_parts_of_a_sequence_attend_as_the_whole_does(mode, num_ranks, heads, key_heads, length):
    for kind in ("causal", "none", "padded", "padded_causal", "sliding", "tensor"):
        attends(mode, heads, key_heads, length, kind)


def attends_across(lengths, what):
    """From one sequence to another, which is split by its own length."""
    group = RankGroup.of(None)
    layout, key_layout = (SequenceLayout(each, group.size) for each in lengths)
    query, _, _, weights = inputs(4, 2, lengths[0])
    _, key, value, _ = inputs(4, 2, lengths[1])
    generator = torch.Generator().manual_seed(9)
    bias = torch.randn(1, 4, *lengths, dtype=torch.float64, generator=generator) if "bias" in what else None
    sinks = torch.randn(4, dtype=torch.float64, generator=generator) if "sinks" in what else None
    asked = {"softcap": 0.5 if "softcap" in what else None, "scaling": 0.3}
    whole = [each.requires_grad_() for each in (query, key, value)]
    more = {"bias": bias, "sinks": sinks}
    more = {name: None if each is None else each.requires_grad_() for name, each in more.items()}
    expected = attention_as_defined(*whole, **more, **asked)
    (expected * weights).sum().backward()
    layouts = (layout, key_layout, key_layout)
    local = [
        each.take(tensor.detach(), 2, group.rank).clone().requires_grad_()
        for each, tensor in zip(layouts, whole, strict=True)
    ]
    own_sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
    heads = slice(4 // group.size * group.rank, 4 // group.size * (group.rank + 1))
    own_bias = None if bias is None else bias.detach()[:, heads].clone().requires_grad_()
    asked |= {"bias": own_bias, "sinks": own_sinks, "key_layout": key_layout}
    found = all_to_all_attention(*local, AttentionCall(Visibility(None, is_causal=False), layout, group, **asked))
    torch.testing.assert_close(found, layout.take(expected, 2, group.rank).detach())
    (found * layout.take(weights, 2, group.rank)).sum().backward()
    for each, ours, theirs in zip(layouts, local, whole, strict=True):
        torch.testing.assert_close(ours.grad, each.take(theirs.grad, 2, group.rank))
    if bias is not None:
        torch.testing.assert_close(own_bias.grad, bias.grad[:, heads])
    if sinks is not None:
        dist.all_reduce(own_sinks.grad)
        torch.testing.assert_close(own_sinks.grad, sinks.grad)


@matrix(["1"], num_ranks=[1, 2, 4])  # test_ring_attention.py has rings
@on_ranks("num_ranks")
def test_parts_of_a_sequence_attend_to_parts_of_another(num_ranks):
    for lengths in ((7, 12), (12, 7), (5, 1), (1, 6), (8, 8)):
        for what in ((), ("bias",), ("softcap",), ("sinks",), ("bias", "sinks", "softcap")):
            attends_across(lengths, what)
