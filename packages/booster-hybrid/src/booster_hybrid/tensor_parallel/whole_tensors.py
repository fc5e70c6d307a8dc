"""Collectives of tensor parallelism outside of autograd: sums over ranks, and the ranks' parts put together."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup

_GATHER_BYTES, _DEVICE_GATHER_BYTES = 1 << 21, 1 << 27
"""Results are put together in blocks of about this size, so that they need not exist twice."""


def summed(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of a tensor that nobody else reads, in its own memory where that is dense.

    Collective: the group.
    """
    total = tensor.contiguous()
    if total is tensor:
        # Autograd may hand one gradient to several nodes, and a saved output must stay what it was.
        total = tensor.clone()
    group.all_reduce(total).wait()
    return total


def gathered_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return the ranks' parts of the last dimension, put together, outside of autograd.

    Collective: the group.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    whole = tensor.new_empty((rows.shape[0], sum(sizes)))
    nbytes = _GATHER_BYTES if tensor.device.type == "cpu" else _DEVICE_GATHER_BYTES
    step = max(nbytes // max(whole.shape[-1] * tensor.element_size(), 1), 1)
    buffer = tensor.new_empty(min(step, rows.shape[0]) * whole.shape[-1])
    for start in range(0, rows.shape[0], step):
        own = rows[start : start + step]
        bounds = [0, *(own.shape[0] * end for end in itertools.accumulate(sizes))]
        buffer[bounds[group.rank] : bounds[group.rank + 1]].view(own.shape).copy_(own)
        group.all_gather(buffer[: bounds[-1]], bounds).wait()
        parts = [
            buffer[first:last].view(-1, size) for first, last, size in zip(bounds, bounds[1:], sizes, strict=False)
        ]
        torch.cat(parts, dim=-1, out=whole[start : start + step])
    return not_a_view(whole.view(*tensor.shape[:-1], sum(sizes)))


def not_a_view(tensor: Tensor) -> Tensor:
    """Return the result of a differentiable function so that the model may change it in place.

    Autograd refuses that for a view that was made inside of one, be it of memory that nobody else has.
    """
    if not tensor._is_view():  # noqa: SLF001 - no public name
        return tensor
    fresh: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)  # noqa: SLF001 - no public name
    return fresh


def own_part(tensor: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    """Return a rank's part of the last dimension, in memory of its own where it is not all of it."""
    start = sum(sizes[:rank])
    return tensor[..., start : start + sizes[rank]].contiguous()
