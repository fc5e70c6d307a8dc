"""`ToHost`: a small tensor on its way to the host, which computes on meanwhile."""

from __future__ import annotations

import torch


class ToHost:
    """Begins to copy a tensor to the host.

    Args:
        tensor: On any device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._arrived = None if tensor.device.type == "cpu" else torch.Event(tensor.device)
        if self._arrived is not None:
            self._arrived.record()

    @property
    def is_here(self) -> bool:
        """Whether it was on the host."""
        return self._arrived is None

    def wait(self) -> torch.Tensor:
        """Return the copy, once the device has come to where it was begun."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
