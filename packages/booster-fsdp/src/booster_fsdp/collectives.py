"""Gather and reduce units on the CPU by `booster_runtime.collectives`, which are faster than gloo's.

Sums are in rank order and in fp32. Other devices use torch's defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule


MOST_RANKS = 8
"""With more, gloo's own collectives take over: here each rank sends to every other one."""


def use_runtime_collectives(unit: FSDPModule, name: str, number: int) -> None:
    """Let a unit use the collectives of booster-runtime, if this version of torch supports that.

    Args:
        unit: The unit.
        name: Its name in the model.
        number: Its number, the same on every rank.
    """
    module: Any = unit  # the protocols of these two have no public name
    if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
        module.set_custom_all_gather(_AllGather(name, number))
        module.set_custom_reduce_scatter(_ReduceScatter(name, number))


def different_units(what: str) -> ConfigError:
    """Return the error for ranks that run different units."""
    return ConfigError(
        f"Ranks run different units of the model: {what}. FSDP gathers and reduces a unit on all ranks together. Run "
        "the same units on every rank, such as on an input of zeros whose output has no weight in the loss; choose "
        "larger units, as by `TorchFSDPPlugin(unit_min_numel=...)`; or use plugin='ddp' or 'zero'."
    )


class _OfUnit:
    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for torch to fill."""
        return torch.empty(size, dtype=dtype, device=device)

    def _check(self, group: ProcessGroup, numel: int) -> None:
        """Compare the unit, and what is sent of it, with those of the rank before this one.

        gloo aborts where sizes differ, and values of units of equal size would mix.

        Raises:
            ConfigError: If they differ.

        Collective: the group.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1:
            return
        own = torch.tensor([self._number, numel])
        other = own.clone()
        works = [
            dist.irecv(other, group=group, group_src=(rank - 1) % size, tag=_UNIT_TAG),
            dist.isend(own, group=group, group_dst=(rank + 1) % size, tag=_UNIT_TAG),
        ]
        collectives.Pending(works, keep=own).wait()
        number, num_others = other.tolist()
        name = repr(self._name) if self._name else "the model itself"
        if number != self._number:
            what = f"rank {rank} of the group runs {name}, and rank {(rank - 1) % size} another one"
            raise different_units(what)
        if num_others != numel:
            msg = (
                f"Rank {rank} of the group sends {numel} elements of {name}, and rank {(rank - 1) % size} sends "
                f"{num_others}: they train other parameters of it. Freeze and unfreeze the same ones on all ranks."
            )
            raise ConfigError(msg)


_UNIT_TAG = 7021
"""Of messages between two ranks; booster-runtime has others."""


class _AllGather(_OfUnit):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Gather the ranks' inputs; blocks until the end."""
        del async_op
        self._check(group, output_tensor.numel())
        bounds = _even_bounds(output_tensor, group)
        rank = dist.get_rank(group)
        own = output_tensor[bounds[rank] : bounds[rank + 1]]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        collectives.all_gather(output_tensor, bounds, group).wait()


class _ReduceScatter(_OfUnit):
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
        self._check(group, input_tensor.numel())
        is_mean = op == dist.ReduceOp.AVG
        if not is_mean and op != dist.ReduceOp.SUM:
            call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            call(output_tensor, input_tensor, op=op, group=group)
            return
        scale = 1.0 / dist.get_world_size(group) if is_mean else 1.0
        bounds = _even_bounds(input_tensor, group)
        collectives.reduce_scatter(input_tensor, bounds, output_tensor, group, scale=scale).wait()


def _even_bounds(buffer: Tensor, group: ProcessGroup) -> range:
    numel = buffer.numel() // dist.get_world_size(group)
    return range(0, buffer.numel() + 1, max(numel, 1))
