"""Eager models on the host are sharded as lazy ones are: a device gets its shards, and never the whole model.

Moved whole, a model that is larger than a device would end in `boost`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from booster_core.state import box_numel, full_box, slices_of
from booster_runtime.lazy.holders import find_parameters
from booster_runtime.sharding.broadcast import send_first
from booster_runtime.sharding.hosting import is_cut

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext
    from booster_core.ranks import Together
    from booster_core.state import Box
    from booster_runtime.lazy.recording import Filling

_STAYS = "parameters stay on the host"
_SENT_BYTES = 1 << 24
"""Most of a parameter that is on the device on its way to shards."""


def shards_from_host(context: BoostContext) -> bool:
    """Return whether an eager model's parameters stay on the host until a device gets its shards of them.

    They do where ranks have found that this is possible on all of them, before `boost` changed anything.
    """
    return bool(context.prepared.get(_STAYS, False))


def compare_hosts(model: nn.Module, context: BoostContext, meeting: Together) -> None:
    """Find out on this rank what `shards_from_host` returns after the meeting.

    Args:
        model: The user's model.
        context: Device of the run; keeps the answer.
        meeting: Of all ranks.
    """
    is_possible = context.device.type != "cpu" and all(map(_is_plain, model.parameters()))
    context.prepared[_STAYS] = is_possible
    meeting.compare(is_possible, differs=lambda: context.prepared.update({_STAYS: False}))


def _is_plain(parameter: nn.Parameter) -> bool:
    is_expanded = any(
        size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    is_dense = parameter.device.type == "cpu" and parameter.layout == torch.strided and not is_expanded
    return is_dense and type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor


class StateOnHost:
    """Optimizer state that exists before `boost`, kept on the host until this rank's part is cut.

    There is some after training or loading before `boost`, and always for Adagrad.

    Args:
        optimizer: The user's optimizer, whose parameters are on the host.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: dict[Tensor, dict[str, Tensor]] = {}

    def take(self) -> None:
        """Take state of a parameter's shape out of the optimizer; what is left is small, and may go anywhere."""
        for parameter, state in self._optimizer.state.items():
            if not isinstance(state, dict) or not isinstance(parameter, torch.Tensor):
                continue
            tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            large = {
                key: value
                for key, value in tensors.items()
                if value.device.type == "cpu" and is_cut(key, value, parameter.shape)
            }
            for key in large:
                del state[key]
            self._kept[parameter] = large

    def give_back(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Give the optimizer the state that was taken, as it is.

        Args:
            replaced: Parameters that are other objects by now, and those in their place.
        """
        for parameter, large in self._kept.items():
            self._optimizer.state[replaced.get(cast("nn.Parameter", parameter), parameter)].update(large)
        self._kept = {}


class HostSource:
    """The values of an eager model on the host: the first rank's parameters, sent in pieces.

    Args:
        model: A model for which `shards_from_host` holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self.holders = find_parameters(model)
        self._values = [holder.tensor.detach() for holder in self.holders]
        self._absent: Collection[int] = ()

    def leave_out(self, absent: Collection[int]) -> None:
        """Keep nothing of parameters that the model has lost since; other ranks may still have them."""
        self._absent = {id(holder) for holder in self.holders if id(holder.tensor) in absent}

    def give(self, filling: Filling) -> None:
        """Send each parameter, of which a few megabytes are on the device at a time.

        Raises:
            Exception: What went wrong on this rank, after it has taken part for the others.

        Collective: every rank of the world.
        """
        error: Exception | None = None
        for holder in self.holders:
            value = self._values.pop(0)
            device = filling.device or value.device
            shards = filling.shards_of(holder)
            is_whole = shards is None and id(holder) not in self._absent
            whole = torch.empty_like(value, device=device) if is_whole else None
            for box in _boxes(full_box(tuple(value.shape)), _SENT_BYTES // value.element_size()):
                part = value[slices_of(box)].to(device).contiguous()
                send_first([part])
                if whole is not None:
                    whole[slices_of(box)] = part
                if error is None:
                    try:
                        filling.write(shards or (), part, box)
                    except Exception as caught:  # noqa: BLE001 - raised below: other ranks go on
                        error = caught
                del part  # before there is memory for the next one
            if whole is not None:
                holder.become(whole)
        if error is not None:
            raise error


def _boxes(box: Box, most: int) -> Iterator[Box]:
    """Cut a box, along as few dimensions as possible, into ones of at most so many elements."""
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
    if box_numel(box) <= most or dim is None:
        yield box
        return
    start, stop = box[dim]
    step = max(most * (stop - start) // box_numel(box), 1)
    for first in range(start, stop, step):
        yield from _boxes((*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]), most)
