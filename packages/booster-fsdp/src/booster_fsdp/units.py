"""The FSDP units of a model, and what this package has to know of torch's inside of them; nothing else looks there.

torch reduces the gradients of those parameters that have one on this rank, so ranks that used different parameters
would reduce different buffers. Before each reduction a missing gradient is therefore put in as zero, and who was used
is noted, so that what no rank used can have no gradient at all, as in one process.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.distributed.fsdp import FSDPModule


class Units:
    """The units of one model.

    Args:
        modules: The sharded modules in the order of registration, the model itself among them.

    Attributes:
        used: Ids of the sharded parameters that had a gradient when they were reduced, since `forget`.
        num_reductions: How often gradients were reduced.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self.modules = list(modules)
        self.used: set[int] = set()
        self.num_reductions = 0
        for group in self._groups():
            group.post_backward = functools.partial(self._post_backward, group, group.post_backward)

    def reshard(self) -> None:
        """Let the model hold its shards: forward without backward leaves some parameters gathered.

        Collective: none.
        """
        for module in self.modules:
            module.reshard()

    def forget(self, parameters: set[int] | None = None) -> None:
        """Drop gradients that are not reduced yet, and who was used.

        Args:
            parameters: Ids of the sharded parameters that are meant; all when ``None``.

        Collective: none.
        """
        for group in self._groups():
            group._partial_reduce_output = None  # noqa: SLF001 - see the module's docstring, here and below
            for inner in group.fsdp_params:
                if parameters is None or id(inner.sharded_param) in parameters:
                    inner.unsharded_accumulated_grad = None
                    whole = getattr(inner, "_unsharded_param", None)
                    if whole is not None:
                        whole.grad = None
        self.used = set() if parameters is None else self.used - parameters

    def take_parameters(self) -> None:
        """Let torch notice parameters that were registered in place of those it made.

        Collective: none.
        """
        for group in self._groups():
            for inner in group.fsdp_params:
                inner.reset_sharded_param()

    def _groups(self) -> Iterator[Any]:
        for module in self.modules:
            state = module._get_fsdp_state()  # noqa: SLF001
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before torch 2.12 there was one
                groups = [state._fsdp_param_group]  # noqa: SLF001
            yield from (group for group in groups if group is not None)

    def _post_backward(self, group: Any, reduce: Any, *unused: Any) -> None:
        """Complete a unit's gradients, then let torch reduce them."""
        if group.reduce_grads:
            self.num_reductions += 1
            self._complete(group)
        reduce(*unused)

    def _complete(self, group: Any) -> None:
        gathered = [
            (inner, inner._unsharded_param)  # noqa: SLF001
            for inner in group.fsdp_params
            if hasattr(inner, "_unsharded_param") and inner._unsharded_param.requires_grad  # noqa: SLF001
        ]
        summed = next(
            (i.unsharded_accumulated_grad for i, _ in gathered if i.unsharded_accumulated_grad is not None), None
        )
        for inner, whole in gathered:
            gradient = _gradient_of(inner, whole)
            if gradient is not None:
                self.used.add(id(inner.sharded_param))
            else:
                whole.grad = torch.zeros_like(whole)
            # Under `no_sync` sums are kept in the format of the reduction, which then has to be that of all.
            if summed is not None and inner.unsharded_accumulated_grad is None:
                inner.unsharded_accumulated_grad = whole.grad.to(summed.dtype)
                whole.grad = None


def _gradient_of(inner: Any, whole: nn.Parameter) -> torch.Tensor | None:
    return whole.grad if inner.unsharded_accumulated_grad is None else inner.unsharded_accumulated_grad
