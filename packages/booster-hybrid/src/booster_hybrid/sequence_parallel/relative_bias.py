"""Relative position biases that a model computes itself, as T5 does, for the queries or heads that are here.

The model's own function is called for whole sequences: ring attention needs the rows of this rank's queries, and the
exchange of heads, of all rows, those of this rank's heads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from booster_hybrid.sequence_parallel.ulysses import head_ranges
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from booster_hybrid.sequence_parallel.stack import Stack


@outside_of_graphs
def _biases(module: Any, stack: Stack, *_: Any, **__: Any) -> Tensor:
    """Stand for the ``compute_bias`` of an attention module, whatever lengths the model sees.

    Args:
        module: The module, with ``relative_attention_bias``, a table of shape ``(distances, heads)``.
        stack: The layers that it is in.

    Returns:
        Shape ``(1, heads, local positions, positions)``, or that of whole sequences where heads are exchanged.
    """
    length, device = stack.length, module.relative_attention_bias.weight.device
    compute: Any = type(module).compute_bias
    if stack.mode == "all_to_all":
        return compute(module, length, length, device=device)  # type: ignore[no-any-return]
    rows = [
        compute(module, stop - start, length, device=device, past_seen_tokens=start)
        for start, stop in stack.layout(length).ranges[stack.group.rank]
    ]
    return torch.cat(rows, 2)


def split_relative_biases(layer: nn.Module, stack: Stack) -> None:
    """Let the attention of a layer compute the biases that are needed here, in place.

    Args:
        layer: The layer.
        stack: The layers that it is in.
    """
    for module in layer.modules():
        own: Any = module
        if getattr(module, "has_relative_attention_bias", False) and hasattr(type(module), "compute_bias"):
            own.compute_bias = functools.partial(_biases, module, stack)


def own_bias(bias: Tensor | None, stack: Stack, heads: int, num_here: int, key_length: int) -> Tensor | None:
    """Return the part of a bias that this rank needs.

    Args:
        bias: Made by the layers, or by the model for whole sequences or for all queries alike; ``None`` for none.
        stack: The layers that attend.
        heads: Query heads, before they are exchanged.
        num_here: This rank's queries.
        key_length: Number of all keys.

    Returns:
        ``None`` too where the shape is neither's.
    """
    if bias is None or bias.dim() != 4 or bias.shape[-1] != key_length:
        return None
    if bias.shape[2] == 1:  # the same for all queries
        bias = bias.expand(-1, -1, num_here if stack.mode == "ring_attn" else stack.length, -1)
    rows, columns = bias.shape[2], bias.shape[1]
    if stack.mode == "ring_attn":
        if rows == num_here:
            return bias
        return stack.layout(stack.length).take(bias, 2, stack.group.rank) if rows == stack.length else None
    if rows != stack.length:
        return None
    (first, last), _ = head_ranges(heads, heads, stack.group.size)[stack.group.rank]
    if columns == 1:
        return bias
    return bias[:, first:last] if columns == heads else None
