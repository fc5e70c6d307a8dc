"""Differentiable collectives of tensor parallelism, each with its transpose as backward.

Names follow Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): a replicated activation *enters* a split
region, where its gradient becomes a sum over ranks, and partial results *leave* it by a sum.

Inside of the graphs that ``torch.compile`` makes, a sum over ranks is one operation, which the compiler calls as it is:
what it does can't be traced, since it tells other processes addresses, and waits for them. What autograd adds to it is
traced. Results are the same to the bit.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d

from booster_core.errors import GradientError
from booster_hybrid.rank_group import RankGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.tensor_parallel.split import Split

    _Ranks = RankGroup | str
    """A group; in graphs its name, as the compiler of torch 2.10 passes no objects to autograd's functions."""


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


def refuse_second_derivative() -> None:
    """Raise in a backward that is itself to be differentiated: the result would leave out the other ranks.

    Raises:
        GradientError: Under ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # nothing else enables gradients in backward
        msg = (
            "Layers that are split over tensor parallel ranks have no second derivative, which `create_graph=True` "
            "asks for. Leave it out, or train this model with `tp_size=1`."
        )
        raise GradientError(msg)


@torch.library.custom_op("booster_hybrid::sum_over_ranks", mutates_args=())
def _sum_over_ranks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return summed(tensor, _named(name))


@_sum_over_ranks.register_fake
def _(tensor: torch.Tensor, name: str) -> torch.Tensor:
    del name
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("booster_hybrid::gather_last", mutates_args=())
def _gather_last(tensor: torch.Tensor, sizes: list[int], name: str) -> torch.Tensor:
    return gathered_last(tensor, sizes, _named(name))


@_gather_last.register_fake
def _(tensor: torch.Tensor, sizes: list[int], name: str) -> torch.Tensor:
    del name
    return tensor.new_empty((*tensor.shape[:-1], sum(sizes)))


def _named(name: str) -> RankGroup:
    c10d: Any = distributed_c10d
    return RankGroup.of(c10d._resolve_process_group(name))  # noqa: SLF001 - as torch's own operations find theirs


def _told(group: RankGroup) -> _Ranks:
    return group.name if torch.compiler.is_compiling() else group


def _summed(tensor: Tensor, ranks: _Ranks) -> Tensor:
    total: Tensor = _sum_over_ranks(tensor, ranks) if isinstance(ranks, str) else summed(tensor, ranks)
    return total


def _gathered(tensor: Tensor, sizes: list[int], ranks: _Ranks) -> Tensor:
    if isinstance(ranks, str):
        whole: Tensor = _gather_last(tensor, sizes, ranks)
        return whole
    return gathered_last(tensor, sizes, ranks)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: _Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        if not isinstance(ranks, str):  # in graphs each tensor is by itself, and has a gradient
            ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        if len(gradients) == 1:
            return None, None if gradients[0] is None else _summed(gradients[0], ctx.ranks)
        known = [gradient for gradient in gradients if gradient is not None]
        sums = iter(_summed_together(known, ctx.ranks))
        return None, *(None if gradient is None else next(sums) for gradient in gradients)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shape: list[int], dim: int, bounds: list[int], ranks: _Ranks) -> Tensor:
        ctx.shape, ctx.dim, ctx.bounds, ctx.ranks = shape, dim, bounds, ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative()
        # All ranks sum the whole tensor, which is small, instead of each set of sharers its part in a group of its own.
        whole, position = gradient.new_zeros(ctx.shape), 0
        ranges = list(zip(ctx.bounds[::2], ctx.bounds[1::2], strict=True))
        for start, stop in ranges:
            whole.narrow(ctx.dim, start, stop - start).copy_(gradient.narrow(ctx.dim, position, stop - start))
            position += stop - start
        total = _summed(whole, ctx.ranks)
        parts = [total.narrow(ctx.dim, start, stop - start) for start, stop in ranges]
        return torch.cat(parts, ctx.dim), None, None, None, None


class _Paired(torch.autograd.Function):
    """Leaves by a sum, gathers the last dimension or takes a part of it; backward does what transposes it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, operation: str, sizes: list[int], rank: int, ranks: _Ranks) -> Tensor:
        ctx.operation, ctx.sizes, ctx.rank, ctx.ranks = operation, sizes, rank, ranks
        if operation == "leave":
            return _summed(tensor, ranks)
        return _gathered(tensor, sizes, ranks) if operation == "gather" else own_part(tensor, sizes, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative()
        if ctx.operation == "gather":
            gradient = own_part(gradient, ctx.sizes, ctx.rank)
        elif ctx.operation == "take":
            gradient = _gathered(gradient, ctx.sizes, ctx.ranks)
        return gradient, None, None, None, None


def _paired(operation: str, tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    if group.size == 1:
        return tensor
    result: Tensor = _Paired.apply(  # type: ignore[no-untyped-call]
        tensor, operation, list(sizes), group.rank, _told(group)
    )
    return result


def enter(tensors: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """Return replicated tensors for use by split layers; their gradients are summed over ranks, together.

    Collective: the group, in backward.
    """
    if group.size == 1:
        return tuple(tensors)
    if torch.compiler.is_compiling():
        return tuple(_Enter.apply(group.name, tensor)[0] for tensor in tensors)  # type: ignore[no-untyped-call]
    results: tuple[Tensor, ...] = _Enter.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return results


def share(tensor: Tensor, split: Split, group: RankGroup) -> Tensor:
    """Return a part of a parameter that several ranks hold; its gradient is summed over these.

    Collective: the group, in backward.
    """
    bounds = [bound for both in split.ranges for bound in both]
    shape = list(split.global_shape)
    result: Tensor = _Share.apply(tensor, shape, split.dim, bounds, _told(group))  # type: ignore[no-untyped-call]
    return result


def leave(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of partial results; its gradient is the same on every rank.

    Collective: the group.
    """
    return _paired("leave", tensor, (), group)


def gather_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return the ranks' parts of the last dimension, put together; what follows is computed alike on every rank.

    Args:
        tensor: Shape ``(..., sizes[rank])``.
        sizes: Length of each rank's part.
        group: The ranks.

    Collective: the group.
    """
    return _paired("gather", tensor, sizes, group)


def scatter_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return this rank's part of a replicated tensor's last dimension.

    Collective: the group, in backward.
    """
    return _paired("take", tensor, sizes, group)


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
