"""Flags that any rank may raise, combined without waiting for what a device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_runtime import collectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from booster_runtime.collectives import Pending


def between_hosts(device: torch.device, group: ProcessGroup | None = None) -> torch.device:
    """Return where ranks exchange small facts that each rank's host knows and wants to know of the others.

    A backend of devices runs collectives after everything that the device was given before, such as all of backward:
    a host that reads their result stops until then, and the device has nothing to do while the next work is prepared.

    Args:
        device: Where the run computes.
        group: The ranks; ``None`` for all.

    Returns:
        The CPU where the group has a backend for it, as `booster_core.launch` and ``init_process_group`` without a
        backend open it; else ``device``.
    """
    backends = dist.get_backend_config(group)
    return torch.device("cpu") if "cpu:" in backends else device


class RaisedAnywhere:
    """Flags of this rank on their way to the others of a group.

    Args:
        flags: A byte for each flag, 0 or 1; as many on every rank.
        device: Where the run computes; see `between_hosts`.
        group: The ranks; ``None`` for all.

    Collective: every rank of the group, in the same order among collectives.
    """

    def __init__(self, flags: bytearray, device: torch.device, group: ProcessGroup | None = None) -> None:
        self._flags = flags
        self._told: torch.Tensor | None = None
        self._pending: Pending | None = None
        if flags:
            own = torch.frombuffer(flags, dtype=torch.uint8)
            self._told = own.to(between_hosts(device, group))
            self._pending = collectives.all_reduce(self._told, dist.ReduceOp.MAX, group)

    def wait(self) -> bytes:
        """Return for each flag whether any rank has raised it, 0 or 1.

        Collective: none; the exchange was entered when it was started.
        """
        if self._pending is not None and self._told is not None:
            self._pending.wait()
            self._flags[:] = bytes(self._told.tolist())
            self._pending = None
        return bytes(self._flags)
