"""`offload_states` and `reload_states`: a boosted model leaves the device between phases, such as those of RL.

All that a plugin keeps of a model is views of some storages. Their bytes go to page-locked memory and the storages
shrink to nothing; later they grow and get the same bytes again. So whatever refers to them stays what it was. Meanwhile
the tensors are absent: a use raises. (The names are those of DeepSpeed, whose engine has both methods.)
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from booster_core.errors import ConfigError, OffloadError
from booster_core.ranks import NamedCall
from booster_runtime.memory import AbsentTensors, is_absent, locked_buffer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, UntypedStorage

    from booster_core import Booster

_HERE = "It is on the host since `offload_states`: call `booster_runtime.reload_states(booster, model)` first."
_offloaded: weakref.WeakKeyDictionary[nn.Module, _Offloaded] = weakref.WeakKeyDictionary()


def offload_states(booster: Booster, model: nn.Module) -> int:
    """Move all that ranks keep of a boosted model and of its optimizers to the host, until `reload_states`.

    That is parameters, buffers, gradients, masters and optimizer state, under every plugin. Until then forward,
    backward, steps, saving and each use of these tensors raise `OffloadError`. Call it between a step and the next
    forward. On the CPU nothing is copied, and the same calls raise.

    Args:
        booster: Of the run.
        model: The boosted model; one without an optimizer, such as a reference model, too.

    Returns:
        The bytes that this rank's device got back.

    Raises:
        ConfigError: If the model is offloaded already.

    Not moved: tensors of other classes, such as quantized ones, and DDP's buckets, which torch keeps. Views that a
    script has made of parameters or gradients must not be used meanwhile.

    Memory: as much page-locked memory of the host as the device gets back. Time: each byte crosses the bus once.
    Collective: every rank of the world, where gradients are still being summed; else none.
    """
    boosted = booster.boosted_model(model, "offload_states")
    if boosted in _offloaded:
        msg = "The model is offloaded already. Call `reload_states` before `offload_states` is called again."
        raise ConfigError(msg)
    with NamedCall("offload_states"):
        _offloaded[boosted] = offloaded = _Offloaded(boosted.held_tensors(), boosted.unwrap(), booster.device)
    boosted.refuses_use = f"The state of the model can't be read. {_HERE}"
    return offloaded.num_bytes


def reload_states(booster: Booster, model: nn.Module) -> None:
    """Bring back all that `offload_states` has moved; values, tensors and views are what they were.

    Args:
        booster: Of the run.
        model: The boosted model.

    Raises:
        ConfigError: If the model is not offloaded.

    Collective: every rank must do the same; ranks do not wait for each other.
    """
    boosted = booster.boosted_model(model, "reload_states")
    offloaded = _offloaded.pop(boosted, None)
    if offloaded is None:
        msg = "The model is not offloaded. Call `offload_states` before `reload_states`."
        raise ConfigError(msg)
    offloaded.reload()
    boosted.refuses_use = None


class _Offloaded:
    """The storages of a model while their bytes are on the host.

    Args:
        tensors: What is kept of the model.
        module: The user's model, whose forward raises.
        device: Of the run.
    """

    def __init__(self, tensors: Iterable[Tensor], module: nn.Module, device: torch.device) -> None:
        plain = {id(each): each for each in map(_local, tensors) if _can_leave(each)}
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        storages: dict[int, UntypedStorage] = {}
        for tensor in plain.values():
            groups[tensor.dtype, tensor.device].append(tensor)
            if tensor.device.type != "cpu":
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
        self._absent: list[tuple[AbsentTensors, list[Tensor]]] = []
        for (dtype, place), members in groups.items():
            values = [tensor.data for tensor in members]
            absent = AbsentTensors(members, _refuse_use, dtype=dtype, device=place)
            absent.hide()
            self._absent.append((absent, values))
        self._guard = module.register_forward_pre_hook(_refuse_forward, prepend=True)
        self._device = device
        self._wait()  # for copies in other streams
        self._moved = [(storage, _bytes_on_host(storage)) for storage in storages.values()]
        self._wait()
        self.num_bytes = 0
        for storage, _ in self._moved:
            self.num_bytes += storage.nbytes()
            storage.resize_(0)

    def reload(self) -> None:
        """Bring the bytes back, and the tensors."""
        for storage, kept in self._moved:
            storage.resize_(kept.numel())
            _bytes_of(storage).copy_(kept, non_blocking=True)
        self._wait()
        self._guard.remove()
        for absent, values in self._absent:
            absent.end(values)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - the object itself
    return local


def _can_leave(tensor: Tensor) -> bool:
    is_known = type(tensor) in (torch.Tensor, nn.Parameter) or getattr(tensor, "has_plain_memory", False)
    is_plain = is_known and tensor.layout is torch.strided
    if not is_plain or is_absent(tensor):
        return False
    return 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()  # else it has no values


def _bytes_of(storage: UntypedStorage) -> Tensor:
    whole: Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole


def _bytes_on_host(storage: UntypedStorage) -> Tensor:
    source = _bytes_of(storage)
    kept = locked_buffer(source.numel())[: source.numel()]
    kept.copy_(source, non_blocking=True)
    return kept


def _refuse_use(position: int, what: str) -> NoReturn:
    del position
    msg = f"`{what}` was called on a tensor of a boosted model, whose values are not here. {_HERE}"
    raise OffloadError(msg)


def _refuse_forward(module: nn.Module, _: Any) -> NoReturn:
    msg = f"The model `{type(module).__name__}` was called. {_HERE}"
    raise OffloadError(msg)
