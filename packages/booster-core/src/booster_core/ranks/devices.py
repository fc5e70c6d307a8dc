"""The accelerator of this machine, and the backend of its collectives, as torch names them.

Nothing here knows a kind of device: CUDA, ROCm (which torch calls CUDA), XPU and those that extend torch from outside,
such as NPU and HPU, are what ``torch.accelerator`` says, with the backend that is registered for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    import torch


def accelerator() -> str | None:
    """Return the type of the device that ranks train on here, such as ``"cuda"``; ``None`` where that is the CPU.

    One without a backend of its own for collectives (Apple's MPS) is used only where it is asked for.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or _own_backend(device.type) is None else device.type


def choose_backend(backend: str | None) -> str:
    """Return the backend to use: by default those of the CPU and of the accelerator, else the one asked for.

    Raises:
        ConfigError: If that belongs to devices which this machine does not have.
    """
    from torch.distributed import Backend

    here = accelerator()
    if backend is None:
        return "gloo" if here is None else f"cpu:gloo,{here}:{_own_backend(here)}"
    for kind in Backend.default_device_backend_map:
        own = _own_backend(kind)
        if own is not None and own in backend and kind != here:
            msg = (
                f"`backend={backend!r}` needs a device of type '{kind}', and torch sees none here. Leave `backend` "
                "out, or use 'gloo'."
            )
            raise ConfigError(msg)
    return backend


def use_device(local_rank: int) -> torch.device | None:
    """Make the device of a local rank the current one, where there is an accelerator."""
    import torch

    kind = accelerator()
    if kind is None:
        return None
    # Modulo: a task of srun may see its own device alone, whatever its local rank.
    device = torch.device(kind, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


def describe_devices() -> dict[str, str]:
    """Return the name and the memory of each device of the accelerator, by type and index."""
    import torch

    kind = accelerator()
    found = {}
    for index in range(0 if kind is None else torch.accelerator.device_count()):
        read = getattr(torch.get_device_module(kind), "get_device_properties", None)
        properties = None if read is None else read(index)
        memory = getattr(properties, "total_memory", 0)
        found[f"{kind} device {index}"] = f"{getattr(properties, 'name', 'unnamed')}, {memory / 2**30:.1f} GiB"
    return found


def _own_backend(kind: str) -> str | None:
    """Return the backend that torch has for a device type; ``None`` where that is the CPU's, or there is none."""
    from torch.distributed import get_default_backend_for_device

    try:
        backend = get_default_backend_for_device(kind)
    except ValueError:
        return None
    return None if backend == "gloo" else backend
