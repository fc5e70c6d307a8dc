"""Shard a lazy model: units are made of meta tensors, and each rank then fills only its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from booster_core.plugin import rebind, stored_dtypes
from booster_fsdp._torch_private import take_parameters
from booster_runtime.lazy import take_recording
from booster_runtime.sharding import dtensor_shards, local_of, raised_on_all, send_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.fsdp import FSDPModule
    from torch.optim import Optimizer

    from booster_core.precision import PrecisionPolicy
    from booster_runtime.lazy import Recording


def hollow_model(
    model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, policy: PrecisionPolicy
) -> Recording:
    """Take the values of a lazy model, or of one on the host, out of it, and move what is left to the device.

    Args:
        model: The model; its lazy tensors, or its parameters, become meta tensors.
        optimizers: Its optimizers.
        device: Where the model will run.
        policy: Sets the dtype of trained parameters.

    Collective: every rank of the world, if the model has tensors with values.
    """
    recording = take_recording(model)
    for optimizer in optimizers:
        rebind(optimizer, recording.replaced)
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - as `Module.to` does
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))  # noqa: SLF001
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            parameter.data = parameter.data.to(device)
    send_first(each.data for each in (*model.parameters(), *model.buffers()) if each.device.type != "meta")
    dtype_of = stored_dtypes(model, policy)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype_of(parameter))
    return recording


def fill_model(
    model: nn.Module,
    recording: Recording,
    units: Iterable[FSDPModule],
    device: torch.device,
    policy: PrecisionPolicy,
    *,
    offload: bool,
) -> None:
    """Fill a sharded model: this rank's shards of sharded parameters, and all of the other tensors.

    Args:
        model: The model, sharded.
        recording: Computes its values.
        units: What `shard_model` returned.
        device: Where the model runs.
        policy: Precision of the run.
        offload: Keep shards in host memory.

    Raises:
        LazyInitError: If files with values are missing, or have changed.

    Collective: every rank of the world.
    """
    home = torch.device("cpu") if offload else device
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor) and local_of(parameter).is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _with_memory(parameter, home)
                module.register_parameter(name, made[id(parameter)])
    take_parameters(units)
    shards = [
        shard
        for path, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        for shard in dtensor_shards(path, None, parameter)
    ]
    with raised_on_all("boost", device):
        recording.fill(shards, device)
    # Replicated tensors were filled in the dtype of their construction.
    dtype_of = stored_dtypes(model, policy)
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(dtype_of(tensor))


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a sharded parameter like a meta one, with uninitialized memory."""
    # Not `DTensor.from_local`, which moves what is offloaded to the device of the mesh.
    return nn.Parameter(torch.empty_like(parameter.detach(), device=device), requires_grad=parameter.requires_grad)
