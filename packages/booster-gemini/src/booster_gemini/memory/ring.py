"""Buffers of one memory that go round; and copies between a device and its host: one stream for each direction.

Memory of the device is allocated in the stream that fills it. So what one block leaves is filled for the next as soon
as it has been copied away, and what is computed waits for neither, but for the arrival of what it uses. The host waits
for no copy.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import torch

from booster_runtime.memory import CopyStream, aligned, aligned_buffer, locked_buffer
from booster_zero.engine import is_free

if TYPE_CHECKING:
    from torch import Tensor


_MOST_COPIED = 2
"""Buffers of one size of which copies may be under way at once: one more would only wait behind them."""


class Ring:
    """Memory of a device or of the host, counted: buffers are lent, and lent again when nobody reads them any more.

    Args:
        device: Whose memory it is.
        budget_bytes: What may be taken at once; ``None`` for no limit.
        pins: Page-lock memory of the host, from which an accelerator copies by itself.
        stream: What fills a device's buffers: memory that is given back is used again in this stream.

    Attributes:
        device: As given.
        budget_bytes: As given.
        used_bytes: What is lent or otherwise taken now.
        peak_bytes: The most that was taken at once.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int | None = None,
        *,
        pins: bool = False,
        stream: CopyStream | None = None,
    ) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.used_bytes = self.peak_bytes = 0
        self._wanted_bytes = self._step_bytes = 0
        self._pins = pins
        self._stream = stream
        # With the bytes of the block that had it last, and the copy that may still be under way.
        self._idle: list[tuple[Tensor, int, torch.Event | None]] = []

    def has(self, num_bytes: int) -> bool:
        """Return whether so many bytes are left of the budget."""
        return self.budget_bytes is None or self.used_bytes + num_bytes <= self.budget_bytes

    @property
    def held_bytes(self) -> int:
        """What is allocated: used bytes, and those that wait to be lent again."""
        return self.used_bytes + sum(num_bytes for _, num_bytes, _ in self._idle)

    def count(self, num_bytes: int) -> None:
        """Count bytes as taken, or as given back where negative."""
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._step_bytes = max(self._step_bytes, self.used_bytes)

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer with arbitrary values: 1-D uint8, of whole sectors of a disk on the host."""
        self.count(num_bytes)
        if self.device.type != "cpu":
            with contextlib.nullcontext() if self._stream is None else self._stream.own_order():
                return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        length = aligned(num_bytes)
        copied = []
        for position, (buffer, _, event) in enumerate(self._idle):
            if buffer.numel() == length and event is not None and not event.query():
                copied.append((position, event))
            elif buffer.numel() == length and is_free(buffer):
                del self._idle[position]
                return buffer
        if len(copied) >= _MOST_COPIED:
            position, event = copied[0]
            event.synchronize()
            if is_free(self._idle[position][0]):
                return self._idle.pop(position)[0]
        if copied:  # as many go round as are copied at once
            self._step_bytes = max(self._step_bytes, self.held_bytes)
        self._trim()
        return locked_buffer(length) if self._pins else aligned_buffer(length)

    def give(self, buffer: Tensor, num_bytes: int, copied: torch.Event | None = None) -> None:
        """Take a buffer back; it is lent again when nobody else reads it, and when an event has come."""
        self.count(-num_bytes)
        if self.device.type == "cpu":  # torch's allocators for accelerators keep memory themselves
            self._idle.append((buffer, num_bytes, copied))
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


class Copies:
    """Copies of blocks up to a device and down to its host.

    Args:
        device: The device.

    Attributes:
        up: Fills the device's buffers, which are allocated in it.
        down: Empties them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.up = CopyStream(device)
        self.down = CopyStream(device)

    def bring(self, target: Tensor, source: Tensor) -> torch.Event | None:
        """Start filling a buffer that is allocated in ``up``; return the event after which it can be used."""
        with self.up.own_order():
            target.copy_(source, non_blocking=True)
        return self.up.record()

    def send(self, target: Tensor, source: Tensor, ready: torch.Event | None) -> torch.Event | None:
        """Start copying a buffer that is allocated in ``up`` to the host, after what has been computed so far.

        Args:
            target: Memory of the host.
            source: The buffer. Its memory is filled again only after the copy.
            ready: The event after which it can be read, if nobody has waited for it.

        Returns:
            The event after which the host can read the copy.
        """
        self.down.wait(ready)
        with self.down.after_compute():
            target.copy_(source, non_blocking=True)
            sent = self.down.record()
        self.up.wait(sent)
        return sent

    def hand_down(
        self, target: Tensor, values: Tensor, ready: torch.Event | None, *, accumulate: bool
    ) -> torch.Event | None:
        """Start setting memory of the host to what was computed, or adding that to it; return the event of the end.

        The sum is made on the device: the host would wait for the copy to add it up.

        Args:
            target: Memory of the host.
            values: Of the device, in the same format.
            ready: The event after which the memory can be read and written.
            accumulate: Whether to add.
        """
        with self.down.after_compute():
            if accumulate:
                self.up.wait(ready)
                with self.up.own_order():
                    total = torch.empty_like(values)
                    total.copy_(target, non_blocking=True)
                self.down.wait(self.up.record())
                values = total.add_(values)
            else:
                self.down.wait(ready)
            target.copy_(values, non_blocking=True)
            sent = self.down.record()
        if accumulate:
            self.up.wait(sent)  # in whose order the sum's memory is used again
        return sent

    def leave(self, buffer: Tensor) -> None:
        """Let a buffer be freed, of which everything that has been started so far may read."""
        self.up.wait_for_compute()
        if not is_free(buffer):  # others have views of it, and free it later than this
            buffer.record_stream(torch.accelerator.current_stream(self._device))

    def synchronize(self) -> None:
        """Return once nothing is copied any more."""
        self.up.synchronize()
        self.down.synchronize()


def give_back_freed() -> None:
    """Give memory that was freed, and that the C library keeps for later, back to the system, where it can be asked to.

    Gradients on their way and activations are allocated and freed in any order, so that it keeps much more than is
    ever in use at once.
    """
    with contextlib.suppress(AttributeError, OSError):  # a C library that has no such function
        ctypes.CDLL(None).malloc_trim(0)


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
