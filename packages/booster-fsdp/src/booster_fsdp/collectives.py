"""Gather and reduce units on the CPU by `booster_runtime.collectives`, which are faster than gloo's.

Sums are in rank order and in fp32. Each is announced by two numbers, so that ranks that run different units raise: gloo
would end the process. Other devices use torch's defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_fsdp._torch_private import trained_of
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule


MOST_RANKS = 8
"""With more, gloo's own collectives take over: here each rank sends to every other one."""


def use_runtime_collectives(units: Mapping[str, FSDPModule]) -> None:
    """Let units, given by name, use the collectives of booster-runtime, if this version of torch supports that."""
    for number, (name, unit) in enumerate(units.items()):
        module: Any = unit  # the protocols of these two have no public name
        if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_all_gather(_AllGather(name, number, unit))
            module.set_custom_reduce_scatter(_ReduceScatter(name, number, unit))


def check_trained(trained: Mapping[str, bool], of_ranks: Sequence[bytes]) -> None:
    """Raise if ranks train other parameters, which is why they run other units.

    Args:
        trained: This rank's, by name.
        of_ranks: Whether each rank trains each parameter.

    Raises:
        ConfigError: If they do.
    """
    for name, flags in zip(trained, zip(*of_ranks, strict=True), strict=False):
        if len(set(flags)) > 1:
            frozen, others = (", ".join(str(rank) for rank, own in enumerate(flags) if own == flag) for flag in (0, 1))
            msg = (
                f"Parameter '{name}' is frozen on rank {frozen} and trained on rank {others}. FSDP reduces gradients "
                "on all ranks together. Freeze and unfreeze the same parameters on every rank, before its forward."
            )
            raise ConfigError(msg)


def different_units(what: str) -> ConfigError:
    """Return the error for ranks that run different units."""
    return ConfigError(
        f"Ranks run different units of the model, or train other parameters of one: {what}. FSDP gathers and reduces a "
        "unit on all ranks together. Freeze the same parameters and run the same units on every rank, such as on an "
        "input of zeros whose output has no weight in the loss; choose larger units, as by "
        "`TorchFSDPPlugin(unit_min_numel=...)`; or use plugin='ddp' or 'zero'."
    )


class _OfUnit:
    verb: ClassVar[str]

    def __init__(self, name: str, number: int, unit: FSDPModule) -> None:
        self._name, self._number, self._unit = name, number, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for torch to fill."""
        return torch.empty(size, dtype=dtype, device=device)

    def _announce(self, numel: int, group: ProcessGroup) -> None:
        """Raise on every rank of a group whose ranks gather or reduce different units, or other parts of one.

        Raises:
            ConfigError: If they do.
        """
        number = hash((self.verb == "gathers", self._number, numel))  # the same on every rank, as numbers' hashes are
        if not collectives.same_on_all(number, group):
            own = f"{self.verb} {numel} elements of {repr(self._name) if self._name else 'the model itself'}"
            trained = trained_of([self._unit])
            of_ranks = collectives.all_gather_object((own, self._number, bytes(trained.values())), group)
            if len({number for _, number, _ in of_ranks}) == 1:
                check_trained(trained, [flags for *_, flags in of_ranks])
            raise different_units(
                ", and ".join(f"rank {rank} of the group {what}" for rank, (what, *_) in enumerate(of_ranks))
            )


class _AllGather(_OfUnit):
    verb = "gathers"

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Gather the ranks' inputs; blocks until the end."""
        del async_op
        numel, own_numel = output_tensor.numel(), input_tensor.numel()
        self._announce(numel, group)
        start = group.rank() * own_numel
        own = output_tensor[start : start + own_numel]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        collectives.all_gather(output_tensor, range(0, numel + 1, max(own_numel, 1)), group).wait()


class _ReduceScatter(_OfUnit):
    verb = "reduces"

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
        self._announce(input_tensor.numel(), group)
        scale = 1.0 / group.size() if is_mean else 1.0
        bounds = range(0, input_tensor.numel() + 1, max(output_tensor.numel(), 1))
        collectives.reduce_scatter(input_tensor, bounds, output_tensor, group, scale=scale).wait()
