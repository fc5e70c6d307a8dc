"""Memory for a replay's storages, with what has been let go of handed out again.

A C library's heap does not take an aligned block back into the hole that one of the same size has left, so that a
replay that makes and drops a tensor for each parameter would leave a hole for each. Blocks above glibc's largest
``mmap`` threshold never lie in the heap, and go back to the system at once.
"""

from __future__ import annotations

import torch

_HEAP_BYTES = 32 << 20


class Memory:
    """Makes storages, and keeps one spare of each size."""

    def __init__(self) -> None:
        self._spare: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def take(self, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
        """Return a storage; what it holds is not defined."""
        spare = self._spare.pop((num_bytes, device), None)
        if spare is not None:
            return spare
        return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def give(self, storage: torch.UntypedStorage) -> None:
        """Take a storage back that nobody else holds."""
        if storage.device.type == "cpu" and storage.nbytes() <= _HEAP_BYTES:
            self._spare[storage.nbytes(), storage.device] = storage
