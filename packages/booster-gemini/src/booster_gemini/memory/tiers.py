"""Bytes of one memory, counted: buffers are lent to blocks, and lent again when nobody reads them any more."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import torch

from booster_runtime.memory import aligned, aligned_buffer, locked_buffer
from booster_zero.engine import is_free

if TYPE_CHECKING:
    from torch import Tensor

    from booster_runtime.memory import CopyStream


class Tier:
    """Memory of a device or of the host.

    Args:
        device: Whose memory it is.
        budget_bytes: What may be taken at once; ``None`` for no limit.
        pins: Allocate page-locked memory, from which an accelerator copies by itself.
        copy_stream: What fills a device's buffers. Memory that is given back is used again in this stream, after
            what it has been told to wait for, so that nothing else waits for those who leave.

    Attributes:
        pins: As given.
        used_bytes: What blocks and reservations take now.
        peak_bytes: The most that was taken at once.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int | None = None,
        *,
        pins: bool = False,
        copy_stream: CopyStream | None = None,
    ) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.used_bytes = self.peak_bytes = 0
        self._wanted_bytes = self._step_bytes = 0
        self.pins = pins
        self._copy_stream = copy_stream
        self._idle: list[tuple[Tensor, int]] = []  # with the bytes of the block that had it last

    def has(self, num_bytes: int) -> bool:
        """Return whether so many bytes are left of the budget."""
        return self.budget_bytes is None or self.used_bytes + num_bytes <= self.budget_bytes

    @property
    def held_bytes(self) -> int:
        """What is allocated: used bytes, and those that wait to be lent again."""
        return self.used_bytes + sum(num_bytes for _, num_bytes in self._idle)

    def count(self, num_bytes: int) -> None:
        """Count bytes as taken, or as given back where negative."""
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._step_bytes = max(self._step_bytes, self.used_bytes)

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer with arbitrary values: 1-D uint8, of whole sectors of a disk on the host."""
        self.count(num_bytes)
        if self.device.type != "cpu":
            with contextlib.nullcontext() if self._copy_stream is None else self._copy_stream.own_order():
                return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        length = aligned(num_bytes)
        for position, (buffer, _) in enumerate(self._idle):
            if buffer.numel() == length and is_free(buffer):
                del self._idle[position]
                return buffer
        self._trim()
        return locked_buffer(length) if self.pins else aligned_buffer(length)

    def give(self, buffer: Tensor, num_bytes: int) -> None:
        """Take a buffer back; it is lent again when nobody else reads it."""
        self.count(-num_bytes)
        if self.device.type == "cpu":  # torch's allocators for accelerators keep memory themselves
            self._idle.append((buffer, num_bytes))
            self._trim()

    def _trim(self) -> None:
        """Give idle memory back to the system where it would go beyond the budget, or nobody is going to use it."""
        most = max(self._wanted_bytes, self._step_bytes) if self.budget_bytes is None else self.budget_bytes
        while self._idle and self.held_bytes > most:
            self._idle.pop(0)

    def end_step(self) -> None:
        """Keep no more idle memory than the step that ends has used at once; the next one is taken to be as it was."""
        self._wanted_bytes, self._step_bytes = self._step_bytes, self.used_bytes
        self._trim()

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        self._idle.clear()


def give_back_freed() -> None:
    """Give memory that was freed, and that the C library keeps for later, back to the system, where it can be asked to.

    Gradients on their way and activations are allocated and freed in any order, so that it keeps much more than is
    ever in use at once.
    """
    with contextlib.suppress(AttributeError, OSError):  # a C library that has no such function
        ctypes.CDLL(None).malloc_trim(0)
