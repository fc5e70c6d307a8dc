"""Fragments of tensors, and the buffers that carry those whose memory does not hold the very bytes to be written.

A snapshot copies all fragments before a call returns, so that training may go on changing the state at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from booster_core.state import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from booster_core.state import Box

_ALIGNMENT = 64
"""Of copies, in bytes: a copy to memory that is aligned to its elements only takes a quarter longer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fragment:
    """Some values of one tensor, and where they belong.

    Args:
        part: Position of the part in the save.
        key: The tensor's name in the file.
        shape: Shape of the whole tensor.
        dtype: Element type in the file.
        box: The index range that the values were cut from.
        flat: The range of the flattened box that they are.
        data: The values, of any shape, strides, dtype and device; their row-major order is that of ``flat``.
    """

    part: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    flat: tuple[int, int]
    data: torch.Tensor

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.flat[1] - self.flat[0]

    @property
    def is_ready(self) -> bool:
        """Whether the memory of ``data`` holds the very bytes to be written."""
        data = self.data
        is_plain = data.device.type == "cpu" and data.dtype == self.dtype and data.is_contiguous()
        return is_plain and not data.is_conj() and not data.is_neg()


def fill_buckets(
    fragments: Iterable[Fragment],
    next_buffer: Callable[[], torch.Tensor],
    copies: DeviceCopies,
    *,
    copies_ready: bool,
) -> Iterator[list[Fragment]]:
    """Yield fragments that are ready to be written, once ``copies`` have been waited for.

    They are views of buffers, cut where a buffer was full.

    Args:
        fragments: Read one at a time; a fragment is not touched after the next one was asked for.
        next_buffer: Returns an empty uint8 buffer on the CPU, at least 16 bytes long. It is asked for one when the
            last one has been handed on, so it may return the same one again.
        copies: Told of each copy.
        copies_ready: Copy fragments that are ready, too. ``False`` yields them as they are, one at a time.
    """
    buffer: torch.Tensor | None = None
    used, held = 0, list[Fragment]()
    for fragment in fragments:
        if not copies_ready and fragment.is_ready:
            yield [fragment]
            continue
        done, itemsize = 0, fragment.dtype.itemsize
        while done < fragment.numel:
            if buffer is None:
                buffer, used, held = next_buffer(), 0, []
            used += -used % _ALIGNMENT
            count = min(fragment.numel - done, (buffer.numel() - used) // itemsize)
            if count <= 0:
                yield held
                buffer = None
                continue
            values = buffer[used : used + count * itemsize].view(fragment.dtype)
            pack(fragment.data, done, done + count, values, non_blocking=True)
            copies.note(fragment.data)
            start = fragment.flat[0] + done
            held.append(replace(fragment, flat=(start, start + count), data=values))
            used += count * itemsize
            done += count
    if buffer is not None and held:
        yield held


class DeviceCopies:
    """Copies from devices to host memory that are under way.

    They alone are waited for, on the devices that they come from: a thread that waited for its current device would
    wait for the first one, whichever the rank's is, and take memory there.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def note(self, source: torch.Tensor) -> None:
        """Take note of a copy that was begun; nothing is to be waited for where it was one between host memories."""
        if source.device.type != "cpu":
            self._devices.add(source.device)

    def wait(self) -> None:
        """Wait for the copies that were noted."""
        for device in self._devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            event.synchronize()
        self._devices.clear()


class SnapshotBuffers:
    """Host memory for one copy of the state, kept between saves in the background that follow each other.

    Args:
        bucket_bytes: Size of one buffer in bytes.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buffers: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        """Copy fragments into the buffers, growing them as needed; what they held before is overwritten.

        Returns:
            The copies, in the dtype of the file, ready to be written.
        """
        used = 0

        def next_buffer() -> torch.Tensor:
            nonlocal used
            if used == len(self._buffers):
                # Pinned where there is a device to copy from, so that its copies run side by side.
                is_pinned = torch.cuda.is_available()
                self._buffers.append(torch.empty(self._bucket_bytes, dtype=torch.uint8, pin_memory=is_pinned))
            used += 1
            return self._buffers[used - 1]

        copies = DeviceCopies()
        buckets = fill_buckets(fragments, next_buffer, copies, copies_ready=True)
        taken = list(itertools.chain.from_iterable(buckets))
        copies.wait()
        return taken

    def release(self) -> None:
        """Give the memory back."""
        self._buffers = []
