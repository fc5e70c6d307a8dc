"""Gather and reduce units on the CPU by `booster_runtime.collectives`, which are faster than gloo's.

Sums are in rank order and in fp32. Other devices use torch's defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule


def use_runtime_collectives(module: FSDPModule) -> None:
    """Let a unit use the collectives of booster-runtime, if this version of torch supports that."""
    unit: Any = module  # the protocols of these two have no public name
    if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
        unit.set_custom_all_gather(_AllGather())
        unit.set_custom_reduce_scatter(_ReduceScatter())


class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for torch to fill."""
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Buffers):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Gather the ranks' inputs; blocks until the end."""
        del async_op
        bounds = _even_bounds(output_tensor, group)
        rank = dist.get_rank(group)
        own = output_tensor[bounds[rank] : bounds[rank + 1]]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        collectives.all_gather(output_tensor, bounds, group).wait()


class _ReduceScatter(_Buffers):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Reduce the ranks' inputs; blocks until the end."""
        del async_op
        is_mean = op == dist.ReduceOp.AVG
        if not is_mean and op != dist.ReduceOp.SUM:
            call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            call(output_tensor, input_tensor, op=op, group=group)
            return
        scale = 1.0 / dist.get_world_size(group) if is_mean else 1.0
        bounds = _even_bounds(input_tensor, group)
        collectives.reduce_scatter(input_tensor, bounds, output_tensor, group, scale=scale).wait()


def _even_bounds(buffer: Tensor, group: ProcessGroup) -> list[int]:
    size = dist.get_world_size(group)
    return [rank * (buffer.numel() // size) for rank in range(size + 1)]
