"""Eager models on the host are sharded as lazy ones are: a device gets its shards, and never the whole model.

Moved whole, a model that is larger than a device would end in `boost`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from booster_core.state import box_numel, box_shape, full_box, intersect, regions_of, slices_of
from booster_runtime.lazy.holders import Holder, loosened
from booster_runtime.sharding.broadcast import send_first
from booster_runtime.sharding.hosting import is_cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_core.ranks import DistCoordinator
    from booster_core.state import Box, TensorShard

_SENT_BYTES = 1 << 24
"""Most of a parameter that is on the device on its way to shards."""


def shards_from_host(model: nn.Module, device: torch.device, coordinator: DistCoordinator) -> bool:
    """Return whether an eager model's parameters stay on the host until a device gets its shards of them.

    They do where that is possible on every rank.

    Args:
        model: The user's model.
        device: Where the model will run.
        coordinator: The ranks.

    Collective: every rank of the world, where ``device`` is not the CPU.
    """
    if device.type == "cpu":
        return False
    is_possible = all(map(_is_plain, model.parameters()))
    return all(coordinator.all_gather_object(is_possible, name="boost"))


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


class HostValues:
    """The values of an eager model's parameters; it has what strategies use of `Recording`.

    Args:
        model: A model for which `shards_from_host` holds.

    Attributes:
        replaced: Parameters that could not stay the same objects, and those in their place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.replaced: dict[nn.Parameter, nn.Parameter] = {}
        self._holders: list[Holder] = []
        self._absent: set[int] = set()
        by_id: dict[int, Holder] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():  # noqa: SLF001 - the dictionary that holds it
                if parameter is None:
                    continue
                holder = by_id.get(id(parameter))
                if holder is None:
                    unrecorded = cast("Any", None)
                    holder = by_id[id(parameter)] = Holder(parameter, unrecorded, unrecorded, is_parameter=True)
                    self._holders.append(holder)
                holder.names.append(f"{path}.{name}" if path else name)
                holder.places.append((module._parameters, name))  # noqa: SLF001
        self._values = {id(holder): holder.tensor.detach() for holder in self._holders}

    @property
    def name_of(self) -> dict[int, str]:
        """First names of the parameters, by ``id`` of the tensor objects."""
        return {id(holder.tensor): holder.names[0] for holder in self._holders}

    def leave_out_absent(self) -> None:
        """Forget the values of parameters that the model has lost since; other ranks may still have them."""
        present = {id(parameter) for parameter in self._model.parameters()}
        self._absent = {id(holder) for holder in self._holders if id(holder.tensor) not in present}

    def hollow(self, device: torch.device | str = "meta") -> None:
        """Turn the parameters into meta tensors, or into ones of a device with one element of memory each."""
        with loosened(self._model):
            for holder in self._holders:
                value = self._values[id(holder)]
                if torch.device(device).type == "meta":
                    self._become(holder, torch.empty_like(value, device="meta"))
                else:
                    self._become(holder, torch.zeros((), dtype=value.dtype, device=device).expand(value.shape))

    def fill(
        self,
        shards: Iterable[TensorShard],
        device: torch.device,
        *,
        before_write: Callable[[TensorShard], None] | None = None,
    ) -> None:
        """Write to each shard its part of the first rank's parameter; give all others their values on the device.

        A few megabytes of a parameter are on the device at a time.

        Args:
            shards: What this rank keeps.
            device: Where the model runs.
            before_write: As for `Recording.fill`.

        Raises:
            Exception: What went wrong on this rank, after it has taken part for the others.

        Collective: every rank of the world.
        """
        by_name: dict[str, list[TensorShard]] = defaultdict(list)
        for shard in shards:
            by_name[shard.name].append(shard)
        error: Exception | None = None
        with loosened(self._model):
            for holder in self._holders:
                value = self._values.pop(id(holder))
                name = next((name for name in holder.names if name in by_name), None)
                is_whole = name is None and id(holder) not in self._absent
                whole = torch.empty_like(value, device=device) if is_whole else None
                for box in _boxes(full_box(tuple(value.shape)), _SENT_BYTES // value.element_size()):
                    part = value[slices_of(box)].to(device).contiguous()
                    send_first([part])
                    if whole is not None:
                        whole[slices_of(box)] = part
                    if error is None:
                        try:
                            for shard in by_name.get(name or "", ()):
                                _write(shard, part, box, before_write)
                        except Exception as caught:  # noqa: BLE001 - raised below: other ranks go on
                            error = caught
                    del part  # before there is memory for the next one
                if whole is not None:
                    self._become(holder, whole)
        if error is not None:
            raise error

    def _become(self, holder: Holder, value: Tensor) -> None:
        old = holder.tensor
        holder.become(value)
        if holder.tensor is not old:
            self.replaced[cast("nn.Parameter", old)] = cast("nn.Parameter", holder.tensor)


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


def _write(shard: TensorShard, part: Tensor, box: Box, before_write: Callable[[TensorShard], None] | None) -> None:
    """Write to a shard what it has of a box of its parameter."""
    regions = [(region, intersect(region.box, box)) for region in regions_of(shard.box, shard.flat)]
    if before_write is not None and any(common is not None for _, common in regions):
        before_write(shard)
    data = shard.data.detach()
    for region, common in regions:
        if common is None:
            continue
        values = data
        if shard.flat is not None:
            values = data.view(-1)[region.start : region.start + region.numel].view(box_shape(region.box))
        values[slices_of(common, region.box)].copy_(part[slices_of(common, box)])
