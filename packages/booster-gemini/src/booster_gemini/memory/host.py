"""The host's memory as the place of blocks that a device computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from booster_gemini.memory.ring import Copies, Ring


class HostPlace:
    """Page-locked memory of the host, from and to which a device copies by itself.

    Args:
        num_bytes: Size of the block.
        ring: Lends the memory.
        copies: Copies between it and the device.

    Attributes:
        name: The memory, for tables.
        keeps_buffer: Whether what is sent must be left alone until `settle`; else it may be freed at once.
        is_done: Whether `settle` does not wait.
    """

    name = "cpu"
    keeps_buffer = False
    is_done = True

    def __init__(self, num_bytes: int, ring: Ring, copies: Copies) -> None:
        self._num_bytes, self._ring, self._copies = num_bytes, ring, copies
        self._bytes = ring.take(num_bytes)
        self._copied: torch.Event | None = None

    def send(self, buffer: Tensor, ready: torch.Event | None) -> None:
        """Start copying a block here, whose values are there after an event."""
        self._copied = self._copies.send(self._bytes[: self._num_bytes], buffer, ready)

    def bring(self, buffer: Tensor) -> None:
        """Start filling a block."""
        self._copied = self._copies.bring(buffer, self._bytes[: self._num_bytes])

    def settle(self) -> torch.Event | None:
        """End what was started as far as it takes the host, and return the event after which a block can be used."""
        return self._copied

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values here, once copies from and to here have ended."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._bytes[: self._num_bytes].view(dtype)

    def abandon(self) -> None:
        """Give up what was started."""

    def drop(self) -> None:
        """Give the place up."""
        self._ring.give(self._bytes, self._num_bytes, self._copied)
