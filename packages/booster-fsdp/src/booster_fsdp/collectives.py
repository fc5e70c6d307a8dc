"""Gather and reduce units on the CPU by `booster_runtime.collectives`, which are faster than gloo's.

Sums are in rank order and in fp32. Other devices use torch's defaults.

Gathers and reductions run while the model computes, so that a rank seldom waits for a slower one: torch begins to
gather a unit ahead of its forward and backward, and a unit's reduction ends before that of the next one begins, in the
memory that torch keeps for it anyway.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_fsdp._torch_private import finish_in_backward
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule


class Reductions:
    """Reductions of a model's units that have begun, and that its backward does not wait for until the next one begins.

    Their results are no gradients before `finish`: parameters get them then.

    Args:
        has_replicas: torch averages the results of units over replicas, so that each is waited for.
    """

    def __init__(self, *, has_replicas: bool) -> None:
        self._has_replicas = has_replicas
        self._dtype: torch.dtype | None = None
        self._begun: list[collectives.Pending] = []
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []

    @contextlib.contextmanager
    def unfinished(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let the reduction of a unit inside of the block go on after it.

        Args:
            parameters: The unit's trained sharded parameters, of one dtype. Where one has a gradient, torch adds to it
                at once, so that the reduction is waited for.
        """
        is_read = self._has_replicas or not parameters or any(each.grad is not None for each in parameters)
        self._dtype = None if is_read else parameters[0].dtype
        try:
            yield
        finally:
            self._dtype = None
        if self._begun:
            self._gradients += [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            finish_in_backward(self.finish)

    def add(self, begun: collectives.Pending, dtype: torch.dtype) -> None:
        """Take a reduction that has begun; wait for it where torch reads its result right away."""
        if dtype == self._dtype:  # else torch rounds the result
            self._begun.append(begun)
        else:
            begun.wait()

    def finish(self) -> None:
        """Wait for the reductions that have begun, and give parameters their gradients."""
        while self._begun:
            self._begun.pop().wait()
        while self._gradients:
            parameter, gradient = self._gradients.pop()
            parameter.grad = gradient


def use_runtime_collectives(module: FSDPModule, reductions: Reductions) -> None:
    """Let a unit use the collectives of booster-runtime, if this version of torch supports that."""
    unit: Any = module  # the protocols of these two have no public name
    if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
        unit.set_custom_all_gather(_AllGather())
        unit.set_custom_reduce_scatter(_ReduceScatter(reductions))


class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for torch to fill."""
        return torch.empty(size, dtype=dtype, device=device)


class _Gathered(dist.Work):
    """A gather that has begun, as torch waits for one: before it copies the values to the parameters."""

    def __init__(self, begun: collectives.Pending) -> None:
        super().__init__()
        self._begun = begun

    def wait(self, *_: Any) -> bool:
        self._begun.wait()
        return True


class _AllGather(_Buffers):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> dist.Work:
        """Begin to gather the ranks' inputs; torch waits where it needs them."""
        del async_op
        bounds = _even_bounds(output_tensor, group)
        rank = dist.get_rank(group)
        own = output_tensor[bounds[rank] : bounds[rank + 1]]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        return _Gathered(collectives.all_gather(output_tensor, bounds, group))


class _ReduceScatter(_Buffers):
    def __init__(self, reductions: Reductions) -> None:
        self._reductions = reductions

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Begin to reduce the ranks' inputs; blocks until the end where torch reads the result right away."""
        del async_op
        is_mean = op == dist.ReduceOp.AVG
        if not is_mean and op != dist.ReduceOp.SUM:
            call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            call(output_tensor, input_tensor, op=op, group=group)
            return
        scale = 1.0 / dist.get_world_size(group) if is_mean else 1.0
        bounds = _even_bounds(input_tensor, group)
        begun = collectives.reduce_scatter(input_tensor, bounds, output_tensor, group, scale=scale)
        if is_mean:
            self._reductions.add(begun, output_tensor.dtype)
        else:  # torch divides the sum itself
            begun.wait()


def _even_bounds(buffer: Tensor, group: ProcessGroup) -> list[int]:
    size = dist.get_world_size(group)
    return [rank * (buffer.numel() // size) for rank in range(size + 1)]
