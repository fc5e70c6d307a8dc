"""Complete gradients and buffers after backward: unused parameters, replicated parameters, changed buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from booster_core.ranks import NamedCall
from booster_runtime import collectives
from booster_runtime.sharding import BufferWatch, RaisedAnywhere

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from booster_fsdp.units import Units


class Settlement:
    """Completes the gradients of a sharded model.

    Args:
        model: The user's model, sharded.
        units: Its units.
        device: Where it runs.
        broadcast_buffers: Broadcast buffers that forward changes.
    """

    def __init__(self, model: nn.Module, units: Units, device: torch.device, *, broadcast_buffers: bool) -> None:
        self._parameters = list(model.parameters())
        self._units = units
        self._device = device
        self._broadcast_buffers = broadcast_buffers
        self._num_settled = 0
        self._buffers = BufferWatch(model)
        self._changed_buffers: list[bool] = []
        self.has_backward = False

    def settle(self) -> None:
        """Reduce the gradients of ``no_sync``, and average those of replicated parameters.

        A parameter that no rank used keeps no gradient.

        Collective: every rank of the world, if there was a backward since the last call.
        """
        self._units.reduce_rest()
        if not self.has_backward and self._num_settled == self._units.num_reductions:
            return
        self.has_backward = False
        self._num_settled = self._units.num_reductions
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        used = [id(p) in self._units.used if isinstance(p, DTensor) else p.grad is not None for p in trained]
        changed = self._buffers.changed() if self._broadcast_buffers else []
        anywhere = [*map(bool, RaisedAnywhere(bytearray([*used, *changed]), self._device).wait())]
        self._changed_buffers = anywhere[len(trained) :]
        whole = []
        for parameter, is_used in zip(trained, anywhere[: len(trained)], strict=True):
            if not is_used:
                parameter.grad = None
            elif not isinstance(parameter, DTensor):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                whole.append(parameter.grad)
        _average(whole)

    def settle_each_backward(self) -> None:
        """Complete gradients at the end of each backward, for a model whose optimizer is not ours.

        Collective: none, but each later backward is collective over all ranks.
        """
        whole = [p for p in self._parameters if p.requires_grad and not isinstance(p, DTensor)]
        self._units.settle_each_backward(self._after_backward, whole)

    def _after_backward(self) -> None:
        self.has_backward = True
        self.settle()
        self.send_buffers()
        # Existing gradients count as used in the next backward: there is no call that tells when they are dropped.
        self._units.used.clear()

    def send_buffers(self) -> None:
        """Broadcast rank 0's values of the buffers that had changed on any rank when gradients were completed.

        Collective: every rank of the world.
        """
        if not any(self._changed_buffers):
            return
        with NamedCall("sharing of buffers"):
            self._buffers.send_changed(self._changed_buffers)
        self._changed_buffers = []


def _average(gradients: Sequence[Tensor]) -> None:
    """Average gradients over all ranks in place, in one collective for each dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, _), tensors in by_kind.items():
        wide = torch.promote_types(dtype, torch.float32)
        flat = torch.cat([tensor.detach().flatten().to(wide) for tensor in tensors])
        collectives.all_reduce(flat).wait()
        flat /= dist.get_world_size()
        parts: Sequence[Tensor] = flat.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
