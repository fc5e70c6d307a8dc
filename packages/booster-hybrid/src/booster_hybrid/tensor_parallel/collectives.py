"""Differentiable collectives of tensor parallelism, each with its transpose as backward.

Names follow Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): a replicated activation *enters* a split
region, where its gradient becomes a sum over ranks, and partial results *leave* it by a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import GradientError
from booster_hybrid.tensor_parallel import traced
from booster_hybrid.tensor_parallel.whole_tensors import gathered_last, own_part, summed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup


def refuse_second_derivative() -> None:
    """Raise in a backward that is itself to be differentiated: the result would leave out the other ranks.

    Raises:
        GradientError: Under ``create_graph=True``.
    """
    if torch.is_grad_enabled():  # nothing else runs backward with gradients enabled
        msg = (
            "Layers that are split over tensor parallel ranks have no second derivative, which `create_graph=True` "
            "asks for. Leave it out, or train this model with `tp_size=1`."
        )
        raise GradientError(msg)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: RankGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        known = [gradient for gradient in gradients if gradient is not None]
        sums = iter(_summed_together(known, ctx.group))
        return None, *(None if gradient is None else next(sums) for gradient in gradients)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup) -> Tensor:
        del ctx
        return summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        refuse_second_derivative()
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return gathered_last(tensor, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        return own_part(gradient, ctx.sizes, ctx.group.rank), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return own_part(tensor, sizes, group.rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        return gathered_last(gradient, ctx.sizes, ctx.group), None, None


def enter(tensors: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """Return replicated tensors for use by split layers; their gradients are summed over ranks, together.

    Collective: the group, in backward.
    """
    if group.size == 1:
        return tuple(tensors)
    if torch.compiler.is_compiling():
        return tuple(traced.enter(tensor, group) for tensor in tensors)
    results: tuple[Tensor, ...] = _Enter.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return results


def leave(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of partial results; its gradient is the same on every rank.

    Collective: the group.
    """
    if group.size == 1:
        return tensor
    if torch.compiler.is_compiling():
        return traced.leave(tensor, group)
    result: Tensor = _Leave.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def gather_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return the ranks' parts of the last dimension, put together; what follows is computed alike on every rank.

    Args:
        tensor: Shape ``(..., sizes[rank])``.
        sizes: Length of each rank's part.
        group: The ranks.

    Collective: the group.
    """
    if group.size == 1:
        return tensor
    if torch.compiler.is_compiling():
        return traced.gather_last(tensor, sizes, group)
    result: Tensor = _Gather.apply(tensor, sizes, group)  # type: ignore[no-untyped-call]
    return result


def scatter_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return this rank's part of a replicated tensor's last dimension.

    Collective: the group, in backward.
    """
    if group.size == 1:
        return tensor
    if torch.compiler.is_compiling():
        return traced.scatter_last(tensor, sizes, group)
    result: Tensor = _Scatter.apply(tensor, sizes, group)  # type: ignore[no-untyped-call]
    return result


def _summed_together(tensors: Sequence[Tensor], group: RankGroup) -> list[Tensor]:
    """Return sums over ranks of tensors that others may read, of which those of one format travel as one."""
    if len(tensors) == 1:
        return [summed(tensors[0], group)]
    sums: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[index].reshape(-1) for index in places])
        group.all_reduce(flat).wait()
        for index, part in zip(places, torch.split(flat, [tensors[index].numel() for index in places]), strict=True):
            sums[index] = part.view(tensors[index].shape)
    return [sums[index] for index in range(len(tensors))]
