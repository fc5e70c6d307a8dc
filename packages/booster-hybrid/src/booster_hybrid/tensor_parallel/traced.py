"""Collectives of tensor parallelism inside of the graphs that ``torch.compile`` makes.

A sum over ranks is one operation there, which the compiler calls as it is: what it does can't be traced, since it tells
other processes addresses, and waits for them. What autograd adds to it is traced, as functional collectives of torch
are. Results are those of `collectives`, to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d

from booster_hybrid.rank_group import RankGroup
from booster_hybrid.tensor_parallel.whole_tensors import gathered_last, own_part, summed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.tensor_parallel.split import Split


@torch.library.custom_op("booster_hybrid::sum_over_ranks", mutates_args=())
def _sum_over_ranks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return summed(tensor, _group(name))


@_sum_over_ranks.register_fake
def _(tensor: torch.Tensor, name: str) -> torch.Tensor:
    del name
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("booster_hybrid::gather_last", mutates_args=())
def _gather_last(tensor: torch.Tensor, sizes: list[int], name: str) -> torch.Tensor:
    return gathered_last(tensor, sizes, _group(name))


@_gather_last.register_fake
def _(tensor: torch.Tensor, sizes: list[int], name: str) -> torch.Tensor:
    del name
    return tensor.new_empty((*tensor.shape[:-1], sum(sizes)))


def _group(name: str) -> RankGroup:
    c10d: Any = distributed_c10d
    return RankGroup.of(c10d._resolve_process_group(name))  # noqa: SLF001 - as torch's own operations find theirs


class _Enter(torch.autograd.Function):
    """Gives a replicated tensor to split layers; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor."""
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the ranks' gradients."""
        total: Tensor = _sum_over_ranks(gradient, ctx.name)
        return total, None


class _Share(torch.autograd.Function):
    # Given no objects, which the compiler of torch 2.10 does not pass on.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shape: list[int], dim: int, bounds: list[int], name: str) -> Tensor:
        ctx.shape, ctx.dim, ctx.bounds, ctx.name = shape, dim, bounds, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        whole, position = gradient.new_zeros(ctx.shape), 0
        ranges = list(zip(ctx.bounds[::2], ctx.bounds[1::2], strict=True))
        for start, stop in ranges:
            whole.narrow(ctx.dim, start, stop - start).copy_(gradient.narrow(ctx.dim, position, stop - start))
            position += stop - start
        total: Tensor = _sum_over_ranks(whole, ctx.name)
        parts = [total.narrow(ctx.dim, start, stop - start) for start, stop in ranges]
        return torch.cat(parts, ctx.dim), None, None, None, None


class _Leave(torch.autograd.Function):
    """Sums partial results over ranks; its gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str) -> Tensor:
        """Return the sum of the ranks' tensors."""
        del ctx
        total: Tensor = _sum_over_ranks(tensor, name)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient."""
        del ctx
        return gradient, None


class _Gather(torch.autograd.Function):
    # Given no objects, which the compiler of torch 2.10 does not pass on.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], rank: int, name: str) -> Tensor:
        ctx.sizes, ctx.rank = sizes, rank
        whole: Tensor = _gather_last(tensor, sizes, name)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return own_part(gradient, ctx.sizes, ctx.rank), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], rank: int, name: str) -> Tensor:
        ctx.sizes, ctx.name = sizes, name
        return own_part(tensor, sizes, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather_last(gradient, ctx.sizes, ctx.name), None, None, None


def enter(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return a replicated tensor for use by split layers; see `collectives.enter`.

    Collective: the group, in backward.
    """
    result: Tensor = _Enter.apply(tensor, group.name)  # type: ignore[no-untyped-call]
    return result


def share(tensor: Tensor, split: Split, group: RankGroup) -> Tensor:
    """Return a part of a parameter that several ranks hold; its gradient is summed over these.

    Collective: the group, in backward.
    """
    bounds = [bound for both in split.ranges for bound in both]
    shape = list(split.global_shape)
    result: Tensor = _Share.apply(tensor, shape, split.dim, bounds, group.name)  # type: ignore[no-untyped-call]
    return result


def leave(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of partial results; see `collectives.leave`.

    Collective: the group.
    """
    result: Tensor = _Leave.apply(tensor, group.name)  # type: ignore[no-untyped-call]
    return result


def gather_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return the ranks' parts of the last dimension, put together; see `collectives.gather_last`.

    Collective: the group.
    """
    result: Tensor = _Gather.apply(tensor, list(sizes), group.rank, group.name)  # type: ignore[no-untyped-call]
    return result


def scatter_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return this rank's part of a replicated tensor's last dimension; see `collectives.scatter_last`.

    Collective: the group, in backward.
    """
    result: Tensor = _Scatter.apply(tensor, list(sizes), group.rank, group.name)  # type: ignore[no-untyped-call]
    return result
