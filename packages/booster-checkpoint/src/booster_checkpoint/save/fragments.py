"""Fragments of tensors, and the buffers that carry those whose memory does not hold the very bytes to be written.

A snapshot of what is on a device is copied in the current stream, which the host does not wait for: what training does
to the state comes after it there.
"""

from __future__ import annotations

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
    fragments: Iterable[Fragment], next_buffer: Callable[[torch.device], torch.Tensor], *, copies_ready: bool
) -> Iterator[tuple[list[Fragment], DeviceCopies | None]]:
    """Yield fragments that are ready to be written, once the copies that come with them have been waited for.

    They are views of a buffer, cut where it was full; without copies, a fragment as it is.

    Args:
        fragments: Read one at a time; when the next one was asked for, one is touched in the current stream only.
        next_buffer: Returns an empty uint8 buffer on the CPU, at least 16 bytes long, for values of a device. It is
            asked for one when the last one has been handed on.
        copies_ready: Copy fragments that are ready, too. ``False`` yields them as they are, one at a time.
    """
    buffer: torch.Tensor | None = None
    used, held, copies = 0, list[Fragment](), DeviceCopies()
    for fragment in fragments:
        if not copies_ready and fragment.is_ready:
            yield [fragment], None
            continue
        done, itemsize = 0, fragment.dtype.itemsize
        while done < fragment.numel:
            if buffer is None:
                buffer, used, held, copies = next_buffer(fragment.data.device), 0, [], DeviceCopies()
            used += -used % _ALIGNMENT
            count = min(fragment.numel - done, (buffer.numel() - used) // itemsize)
            if count <= 0:
                yield held, copies.begun()
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
        yield held, copies.begun()


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory for copies from or to a device: pinned where it is not the CPU, so that the host does not wait."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


class DeviceCopies:
    """Copies between devices and host memory that are under way.

    They alone are waited for, on their devices: a thread that waited for its current device would wait for the first
    one, whichever the rank's is, and take memory there.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        self._events: list[torch.Event] = []

    def note(self, data: torch.Tensor) -> None:
        """Take note of a copy that was begun; nothing is to be waited for where it was one between host memories."""
        if data.device.type != "cpu":
            self._devices.add(data.device)

    def begun(self) -> DeviceCopies:
        """Wait, when it is time, for what was noted until now in the devices' current streams, and for no more."""
        for device in self._devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._events.append(event)
        self._devices.clear()
        return self

    def wait(self) -> None:
        """Wait for the copies that were noted."""
        self.begun()
        for event in self._events:
            event.synchronize()
        self._events.clear()


class SnapshotBuffers:
    """Host memory for one copy of the state, kept between saves in the background that follow each other.

    Args:
        bucket_bytes: Size of one buffer in bytes.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buffers: list[torch.Tensor] = []
        self._copies: list[DeviceCopies] = []

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        """Begin to copy fragments into the buffers, growing them as needed; what they held before is overwritten.

        Returns:
            The copies, in the dtype of the file, ready to be written when `wait` has returned.
        """
        self.wait()  # for those of a snapshot that failed
        used = 0

        def next_buffer(device: torch.device) -> torch.Tensor:
            nonlocal used
            if used == len(self._buffers):
                self._buffers.append(host_buffer(self._bucket_bytes, device))
            used += 1
            return self._buffers[used - 1]

        taken = list[Fragment]()
        for bucket, copies in fill_buckets(fragments, next_buffer, copies_ready=True):
            taken += bucket
            self._copies += [] if copies is None else [copies]
        return taken

    def wait(self) -> None:
        """Wait for the copies; in any thread."""
        while self._copies:
            self._copies.pop().wait()

    def release(self) -> None:
        """Give the memory back."""
        self.wait()
        self._buffers = []
