"""Eager models are sharded as lazy ones where they are on the host and train on a device: one parameter at a time.

Moved whole, a model that is larger than a device would end in `boost`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

import torch

from booster_runtime.lazy.holders import Holder, loosened
from booster_runtime.sharding.agreement import send_first
from booster_runtime.state.regions import pack, slices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.state import TensorShard


def shards_from_host(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> bool:
    """Return whether an eager model's parameters stay on the host until a device gets its shards of them.

    Collective: none.
    """
    if device.type == "cpu" or (optimizer is not None and optimizer.state):
        return False  # existing state moves with whole parameters
    return all(_is_plain(parameter) for parameter in model.parameters())


def _is_plain(parameter: nn.Parameter) -> bool:
    is_expanded = any(
        size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    return parameter.device.type == "cpu" and parameter.layout == torch.strided and not is_expanded


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

    def hollow(self, device: torch.device | str = "meta") -> None:
        """Turn the parameters into meta tensors, or into ones of a device with one element of memory each.

        Collective: none.
        """
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

        One parameter is on the device at a time.

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
                value = self._values.pop(id(holder)).to(device)
                send_first(value)
                name = next((name for name in holder.names if name in by_name), None)
                if name is None:
                    self._become(holder, value)
                elif error is None:
                    try:
                        self._write(value, by_name[name], before_write)
                    except Exception as caught:  # noqa: BLE001 - raised below: other ranks go on
                        error = caught
        if error is not None:
            raise error

    def _write(
        self, value: Tensor, shards: list[TensorShard], before_write: Callable[[TensorShard], None] | None
    ) -> None:
        for shard in shards:
            if before_write is not None:
                before_write(shard)
            part = value[slices_of(shard.box)]
            if shard.flat is None:
                shard.data.detach().copy_(part)
            else:
                pack(part, *shard.flat, shard.data.detach())

    def _become(self, holder: Holder, value: Tensor) -> None:
        old = holder.tensor
        holder.become(value)
        if holder.tensor is not old:
            self.replaced[cast("nn.Parameter", old)] = cast("nn.Parameter", holder.tensor)
