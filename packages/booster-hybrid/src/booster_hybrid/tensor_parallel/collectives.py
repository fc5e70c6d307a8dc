"""Differentiable collectives of tensor parallelism, each with its transpose as backward.

Names follow Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): a replicated activation *enters* a split
region, where its gradient becomes a sum over ranks, and partial results *leave* it by a sum.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import GradientError
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.tensor_parallel.group import TensorGroup


_GATHER_BYTES, _DEVICE_GATHER_BYTES = 1 << 21, 1 << 27
"""Results are put together in blocks of about this size, so that they need not exist twice."""


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
    def forward(ctx: Any, group: TensorGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
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
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        del ctx
        return summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        refuse_second_derivative()
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return gathered_last(tensor, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        return _own_part(gradient, ctx.sizes, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _own_part(tensor, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        return gathered_last(gradient, ctx.sizes, ctx.group), None, None


@outside_of_graphs
def enter(tensors: Sequence[Tensor], group: TensorGroup) -> tuple[Tensor, ...]:
    """Return replicated tensors for use by split layers; their gradients are summed over ranks, together.

    Collective: the group, in backward.
    """
    if group.size == 1:
        return tuple(tensors)
    results: tuple[Tensor, ...] = _Enter.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return results


@outside_of_graphs
def leave(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum over ranks of partial results; its gradient is the same on every rank.

    Collective: the group.
    """
    if group.size == 1:
        return tensor
    result: Tensor = _Leave.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


@outside_of_graphs
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


@outside_of_graphs
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
    group.all_reduce(total).wait()
    return total


def gathered_last(tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
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

    Collective: none.
    """
    if not tensor._is_view():  # noqa: SLF001 - no public name
        return tensor
    fresh: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)  # noqa: SLF001 - no public name
    return fresh


def _summed_together(tensors: Sequence[Tensor], group: TensorGroup) -> list[Tensor]:
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


def _own_part(tensor: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
    start = sum(sizes[: group.rank])
    return tensor[..., start : start + sizes[group.rank]].contiguous()
