"""Memory for gathered values that is used again.

New memory costs the CPU as much as a copy: each page of it is cleared on its first use. Whether a buffer is free is
told by its storage's reference count: autograd, or anybody else, may still hold views of it after its bucket was
released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_OWN_REFERENCES = 2
"""The pool's tensor, and the storage object through which it asks."""

_LARGEST_FIT = 1.5
"""How many times as large as needed a buffer may be."""


class BufferPool:
    """Lends 1-D buffers.

    Args:
        least_bytes: What a buffer has at least on the CPU, so that those of buckets that are not quite full can take
            each other's place. What is not touched takes no memory.
        most_idle_bytes: Idle memory beyond this is given back to the system, the largest buffers first.
    """

    def __init__(self, least_bytes: int, most_idle_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._most_idle_bytes = most_idle_bytes
        self._idle: list[Tensor] = []
        self._idle_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer with arbitrary values, shape ``(numel,)``."""
        if torch.is_inference_mode_enabled():  # what is allocated under it could not be used in training later
            with torch.inference_mode(mode=False):
                return self.take(numel, dtype, device)
        if device.type != "cpu":  # torch's allocators for accelerators keep memory themselves
            return torch.empty(numel, dtype=dtype, device=device)
        needed = numel * dtype.itemsize
        length = max(needed, self._least_bytes)
        fitting = [
            (size, position)
            for position, buffer in enumerate(self._idle)
            if length <= (size := buffer.numel()) <= _LARGEST_FIT * length and is_free(buffer)
        ]
        held = self._pop(min(fitting)[1]) if fitting else torch.empty(length, dtype=torch.uint8)
        return held[:needed].view(dtype)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. Others may still read it; it is lent again when they don't."""
        if buffer.device.type != "cpu":
            return
        idle = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
        self._idle.append(idle)
        self._idle_bytes += idle.numel()
        while self._idle_bytes > self._most_idle_bytes:
            sizes = [idle.numel() for idle in self._idle]
            self._pop(sizes.index(max(sizes)))

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        self._idle.clear()
        self._idle_bytes = 0

    def _pop(self, position: int) -> Tensor:
        buffer = self._idle.pop(position)
        self._idle_bytes -= buffer.numel()
        return buffer


def is_free(buffer: Tensor) -> bool:
    """Return whether a buffer's memory is referred to by this tensor alone."""
    storage = buffer.untyped_storage()
    # As torch's own CUDA graphs ask; there is no public name for it.
    return int(torch._C._storage_Use_Count(storage._cdata)) == _OWN_REFERENCES  # noqa: SLF001
