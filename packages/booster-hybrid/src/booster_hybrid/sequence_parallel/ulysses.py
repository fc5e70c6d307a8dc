"""Attention by exchanging positions for heads: each rank attends with some heads over the whole sequence.

One all-to-all brings queries, keys and values, another brings the outputs back. In between, torch's attention computes
what it can without a mask; the rest is ring attention on one rank, block by block.
Reference: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.mesh import RankGroup
from booster_hybrid.sequence_parallel.exchange import SequenceLayout, exchange
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention

if TYPE_CHECKING:
    from torch import Tensor


def head_ranges(num_heads: int, num_key_value_heads: int, size: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return for each rank the ranges of its query heads and of the key/value heads that these attend to.

    Ranks share a key/value head where there are fewer of them than ranks.

    Args:
        num_heads: Query heads.
        num_key_value_heads: Key/value heads; divides the former.
        size: Number of ranks.

    Raises:
        ConfigError: If the ranks can't have equally many query heads.
    """
    if num_heads % size:
        fitting = [each for each in range(1, num_heads + 1) if num_heads % each == 0]
        msg = (
            f"'all_to_all' gives each rank as many heads as any other, but {num_heads} heads are no multiple of "
            f"{size} ranks. Use `sp_size` of {', '.join(map(str, fitting))}, or 'ring_attn', which splits no heads."
        )
        raise ConfigError(msg)
    share, per_head = num_heads // size, num_heads // num_key_value_heads
    ranges = []
    for rank in range(size):
        first, last = rank * share, (rank + 1) * share
        ranges.append(((first, last), (first // per_head, (last - 1) // per_head + 1)))
    return ranges


def all_to_all_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Return what this rank's queries find among the keys of all ranks.

    Args:
        query: Shape ``(batch, heads, local positions, size)``.
        key: Shape ``(batch, key/value heads, local positions, size)``.
        value: Likewise.
        call: What is asked for.

    Returns:
        Shape ``(batch, heads, local positions, value size)``.

    Raises:
        ConfigError: If the ranks can't have equally many heads.

    Collective: the group, also in backward.
    """
    batch, num_heads = query.shape[:2]
    group, visibility = call.group, call.visibility
    layout, key_layout = call.layouts
    heads = head_ranges(num_heads, key.shape[1], group.size)
    (first, last), (first_kv, last_kv) = heads[group.rank]
    sizes = [query.shape[-1], key.shape[-1], value.shape[-1]]
    counts = [last - first, last_kv - first_kv, last_kv - first_kv]
    parts = [
        torch.cat([query[:, q0:q1].flatten(), key[:, k0:k1].flatten(), value[:, k0:k1].flatten()])
        for (q0, q1), (k0, k1) in heads
    ]
    layouts = [layout, key_layout, key_layout]
    shapes = [
        [
            torch.Size((batch, count, each.lengths[rank], size))
            for count, each, size in zip(counts, layouts, sizes, strict=True)
        ]
        for rank in range(group.size)
    ]
    found = exchange(parts, [sum(shape.numel() for shape in of_rank) for of_rank in shapes], group)
    pieces = [_unpacked(part, of_rank) for part, of_rank in zip(found, shapes, strict=True)]
    query, key, value = (each.put_together([piece[i] for piece in pieces], 2) for i, each in enumerate(layouts))
    key, value, shares_keys = _aligned(key, value, heads, num_heads, group.rank)
    is_plain = visibility.is_plain and call.bias is None and call.sinks is None and call.softcap is None
    # Where torch has no fused kernel, its attention would have the scores of whole sequences in memory.
    if is_plain and sizes[0] == sizes[2] and not (call.dropout and query.device.type == "cpu"):
        outputs = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=call.dropout,
            scale=call.scaling,
            is_causal=visibility.is_causal,
            enable_gqa=shares_keys,
        )
    else:
        alone = replace(
            call,
            visibility=visibility.of_heads(first, last),
            layout=SequenceLayout(layout.length, 1),
            group=RankGroup(None, 0, 1),
            key_layout=SequenceLayout(key_layout.length, 1),
            sinks=None if call.sinks is None else call.sinks[first:last],
        )
        outputs = ring_attention(query, key, value, alone)
    returned = [layout.take(outputs, 2, rank).flatten() for rank in range(group.size)]
    size, length = outputs.shape[-1], layout.lengths[group.rank]
    found = exchange(returned, [batch * (q1 - q0) * length * size for (q0, q1), _ in heads], group)
    return torch.cat(
        [part.view(batch, q1 - q0, length, size) for part, ((q0, q1), _) in zip(found, heads, strict=True)], 1
    )


def _unpacked(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _aligned(
    key: Tensor,
    value: Tensor,
    heads: list[tuple[tuple[int, int], tuple[int, int]]],
    num_heads: int,
    rank: int,
) -> tuple[Tensor, Tensor, bool]:
    """Return keys and values as attention takes them, and whether several query heads share one."""
    (first, last), (first_kv, last_kv) = heads[rank]
    share, held = last - first, last_kv - first_kv
    if share == held:
        return key, value, False
    per_head = num_heads // heads[-1][1][1]
    is_even = first % per_head == 0 and last % per_head == 0
    if is_even or held == 1:
        return key, value, True
    index = torch.arange(first, last, device=key.device) // per_head - first_kv
    return key[:, index], value[:, index], False
