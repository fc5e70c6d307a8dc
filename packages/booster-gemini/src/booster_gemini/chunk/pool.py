"""Memory for gathered chunks, used again as soon as nobody reads it any more.

New memory costs the CPU as much as a copy: each page of it is cleared on its first use. Whether a buffer is free is
told by its storage's reference count: autograd, or anybody else, may still hold views of it after its chunk was
released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_OWN_REFERENCES = 2
"""The pool's tensor, and the storage object through which it asks."""


class BufferPool:
    """Lends 1-D buffers.

    Args:
        most_idle_bytes: Idle memory beyond this is given back to the system.
    """

    def __init__(self, most_idle_bytes: int) -> None:
        self._most_idle_bytes = most_idle_bytes
        self._idle: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer with arbitrary values, shape ``(numel,)``."""
        for position, buffer in enumerate(self._idle):
            if buffer.numel() == numel and buffer.dtype == dtype and buffer.device == device and is_free(buffer):
                return self._idle.pop(position)
        # What is allocated under inference mode could not be used in training later.
        with torch.inference_mode(mode=False):
            return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. Others may still read it; it is lent again when they don't."""
        if buffer.device.type != "cpu":
            return  # torch's allocators for accelerators keep memory themselves
        self._idle.append(buffer)
        held = sum(idle.untyped_storage().nbytes() for idle in self._idle)
        while self._idle and held > self._most_idle_bytes:
            held -= self._idle.pop(0).untyped_storage().nbytes()

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        self._idle.clear()


def is_free(buffer: Tensor) -> bool:
    """Return whether a buffer's memory is referred to by this tensor alone."""
    storage = buffer.untyped_storage()
    # As torch's own CUDA graphs ask; there is no public name for it.
    return int(torch._C._storage_Use_Count(storage._cdata)) == _OWN_REFERENCES  # noqa: SLF001
