"""Differentiable collectives of tensor parallelism, each with its transpose as backward.

Names follow Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): a replicated activation *enters* a split
region, where its gradient becomes a sum over ranks, and partial results *leave* it by a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.tensor_parallel.group import TensorGroup


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        del ctx
        return summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return gathered_last(tensor, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(gradient, ctx.sizes, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _own_part(tensor, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered_last(gradient, ctx.sizes, ctx.group), None, None


def enter(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return a replicated tensor for use by split layers; its gradient is summed over ranks.

    Collective: the group, in backward.
    """
    if group.size == 1:
        return tensor
    result: Tensor = _Enter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def leave(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum over ranks of partial results; its gradient is the same on every rank.

    Collective: the group.
    """
    if group.size == 1:
        return tensor
    result: Tensor = _Leave.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def gather_last(tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
    """Return the ranks' parts of the last dimension, put together; what follows is computed alike on every rank.

    Args:
        tensor: Shape ``(..., sizes[rank])``.
        sizes: Length of each rank's part.
        group: The ranks.

    Collective: the group.
    """
    if group.size == 1:
        return tensor
    result: Tensor = _Gather.apply(tensor, sizes, group)  # type: ignore[no-untyped-call]
    return result


def scatter_last(tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
    """Return this rank's part of a replicated tensor's last dimension.

    Collective: the group, in backward.
    """
    if group.size == 1:
        return tensor
    result: Tensor = _Scatter.apply(tensor, sizes, group)  # type: ignore[no-untyped-call]
    return result


def summed(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum over ranks of a tensor that nobody else reads, in its own memory where that is dense.

    Collective: the group.
    """
    total = tensor.contiguous()
    if total is tensor:
        # Autograd may hand one gradient to several nodes, and a saved output must stay what it was.
        total = tensor.clone()
    collectives.all_reduce(total, group=group.group).wait()
    return total


def gathered_last(tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
    """Return the ranks' parts of the last dimension, put together, outside of autograd.

    Collective: the group.
    """
    lead = tensor.shape[:-1]
    rows = lead.numel()
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + rows * size)
    buffer = tensor.new_empty(bounds[-1])
    buffer[bounds[group.rank] : bounds[group.rank + 1]] = tensor.reshape(-1)
    collectives.all_gather(buffer, bounds, group.group).wait()
    parts = [buffer[bounds[rank] : bounds[rank + 1]].view(*lead, size) for rank, size in enumerate(sizes)]
    return torch.cat(parts, dim=-1)


def _own_part(tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
    start = sum(sizes[: group.rank])
    return tensor[..., start : start + sizes[group.rank]].contiguous()
