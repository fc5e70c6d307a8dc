"""Fragments of tensors on their way to a file, and the buckets that carry those that cannot go straight from memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from booster_runtime.state.regions import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from booster_core.state import Box


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
    def nbytes(self) -> int:
        """Size in the file."""
        return self.numel * self.dtype.itemsize

    @property
    def is_ready(self) -> bool:
        """Whether the memory of ``data`` holds the very bytes to be written."""
        data = self.data
        is_plain = data.device.type == "cpu" and data.dtype == self.dtype and data.is_contiguous()
        return is_plain and not data.is_conj() and not data.is_neg()


@dataclass(frozen=True, eq=False)
class Bucket:
    """A buffer filled with the values of fragments, each ready to be written.

    Args:
        buffer: The bytes in use, shape ``(nbytes,)``, uint8.
        fragments: What they are; each fragment's data is a view of the buffer.
    """

    buffer: torch.Tensor
    fragments: list[Fragment]


def fill_buckets(fragments: Iterable[Fragment], next_buffer: Callable[[], torch.Tensor]) -> Iterator[Bucket]:
    """Copy fragments into buffers, one after the other, cutting fragments where a buffer is full.

    Args:
        fragments: Read one at a time; a fragment is not touched after the next one was asked for.
        next_buffer: Returns an empty uint8 buffer on the CPU, at least 16 bytes long. It is asked for one when the
            last one has been handed on, so it may return the same one again.

    Collective: none.
    """
    buffer: torch.Tensor | None = None
    used, held = 0, list[Fragment]()
    for fragment in fragments:
        done, itemsize = 0, fragment.dtype.itemsize
        while done < fragment.numel:
            if buffer is None:
                buffer, used, held = next_buffer(), 0, []
            used += -used % itemsize
            count = min(fragment.numel - done, (buffer.numel() - used) // itemsize)
            if count <= 0:
                yield Bucket(buffer[:used], held)
                buffer = None
                continue
            values = buffer[used : used + count * itemsize].view(fragment.dtype)
            pack(fragment.data, done, done + count, values, non_blocking=True)
            start = fragment.flat[0] + done
            held.append(replace(fragment, flat=(start, start + count), data=values))
            used += count * itemsize
            done += count
    if buffer is not None and held:
        yield Bucket(buffer[:used], held)


def synchronize(device_types: set[str]) -> None:
    """Wait for copies from these kinds of devices to end."""
    if device_types - {"cpu", "meta"} and torch.accelerator.is_available():
        torch.accelerator.synchronize()
