"""Copies between a device and the host beside what the device computes, and host memory that suits them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def in_ram(numel: int, dtype: torch.dtype, home: torch.device, beside: torch.device) -> Tensor:
    """Return zeros in memory, such that copies to and from a device need not wait where that can be."""
    pins = home.type == "cpu" and beside.type != "cpu"
    return torch.zeros(numel, dtype=dtype, device=home, pin_memory=pins)


class Lane:
    """A stream of copies and collectives beside the one that computes; nothing on the CPU, which has none.

    Args:
        device: The device whose memory is copied from and to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let what the body starts follow what has been started so far, and run beside what is started later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def mark(self) -> torch.Event | None:
        """Return an event that has come when everything started in the lane so far has ended."""
        return None if self._stream is None else self._stream.record_event()
