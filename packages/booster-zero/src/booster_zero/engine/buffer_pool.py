"""Memory for gathered values that is used again.

New memory costs the CPU as much as a copy: each page of it is cleared on its first use. Whether a buffer is free is
told by its storage's reference count: autograd, or anybody else, may still hold views of it after its bucket was
released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

_use_count: Any = torch._C._storage_Use_Count  # noqa: SLF001 - as torch's own CUDA graphs ask; it has no public name
_OWN_REFERENCES = 2
"""A tensor that is asked of, and the storage object through which that is done."""

_LARGEST_FIT = 1.5
"""How many times as large as needed a buffer may be."""


class BufferPool:
    """Lends 1-D buffers.

    Args:
        least_bytes: What a buffer has at least on the CPU, so that those of buckets that are not quite full can take
            each other's place. What is not touched takes no memory.
        most_idle_bytes: Idle memory beyond this is given back to the system, the largest buffers first.

    Attributes:
        most_idle_bytes: As given; it may be changed.
    """

    def __init__(self, least_bytes: int, most_idle_bytes: int = 0) -> None:
        self._least_bytes = least_bytes
        self.most_idle_bytes = most_idle_bytes
        self._idle: list[tuple[int, torch.UntypedStorage]] = []
        self._idle_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer with arbitrary values, shape ``(numel,)``; outside of inference mode, and without gradients.

        Memory that is allocated under inference mode could not be used in training later.
        """
        if device.type != "cpu":  # torch's allocators for accelerators keep memory themselves
            return torch.empty(numel, dtype=dtype, device=device)
        needed = numel * dtype.itemsize
        length = max(needed, self._least_bytes)
        chosen, chosen_bytes = -1, _LARGEST_FIT * length
        for position, (num_bytes, storage) in enumerate(self._idle):
            if length <= num_bytes <= chosen_bytes and _use_count(storage._cdata) == 1:  # noqa: SLF001 - as in `is_free`
                chosen, chosen_bytes = position, num_bytes - 1
        if chosen < 0:
            return torch.empty(length, dtype=torch.uint8)[:needed].view(dtype)
        taken: Tensor = torch.empty(0, dtype=dtype).set_(self._pop(chosen), 0, (numel,), (1,))
        return taken

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. Others may still read it; it is lent again when they don't."""
        if buffer.device.type != "cpu":
            return
        storage = buffer.untyped_storage()
        num_bytes = storage.nbytes()
        self._idle.append((num_bytes, storage))
        self._idle_bytes += num_bytes
        while self._idle_bytes > self.most_idle_bytes:
            sizes = [each for each, _ in self._idle]
            self._pop(sizes.index(max(sizes)))

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        self._idle.clear()
        self._idle_bytes = 0

    def _pop(self, position: int) -> torch.UntypedStorage:
        num_bytes, storage = self._idle.pop(position)
        self._idle_bytes -= num_bytes
        return storage


def is_free(buffer: Tensor) -> bool:
    """Return whether a buffer's memory is referred to by this tensor alone."""
    storage = buffer.untyped_storage()
    return int(_use_count(storage._cdata)) == _OWN_REFERENCES  # noqa: SLF001
