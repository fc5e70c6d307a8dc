"""How much of a device's memory is left for blocks, by what everything else has kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import ModuleType

_MARGIN = 10
"""One part in so many stays free, for what an allocator loses between blocks and for batches larger than the first."""

_STATISTICS = ("mem_get_info", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "empty_cache")


class FreeMemory:
    """Measures what a device's memory is used for apart from blocks, such as activations.

    What counts is what the allocator keeps: memory that activations have left is kept for the stream that computes,
    and blocks, which are allocated in another one, can't have it. An allocator that has to give memory back first
    waits for the device. The peak that a script reads begins again when measuring does.

    Args:
        device: An accelerator whose module tells free and kept memory, as ``torch.cuda`` does; see `is_told`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = _module(device)

    @classmethod
    def is_told(cls, device: torch.device) -> bool:
        """Return whether a device's module tells all that is needed, and there is a limit."""
        module = _module(device)
        return all(hasattr(module, name) for name in _STATISTICS) and cls(device).reachable_bytes > 0

    @property
    def reachable_bytes(self) -> int:
        """What is free, and what torch has allocated or keeps for later; no more than this process may take."""
        free, total = self._module.mem_get_info(self._device)
        reachable = int(free) + int(self._module.memory_reserved(self._device))
        fraction = getattr(self._module, "get_per_process_memory_fraction", None)  # not every device has a limit
        return reachable if fraction is None else min(reachable, int(total * fraction(self._device)))

    def begin(self) -> None:
        """Begin to measure: what is kept of earlier work goes back to the device."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def left_bytes(self, used_bytes: int) -> int:
        """Return what blocks may take where the rest keeps as much as so far; 0 or less where nothing is left.

        Args:
            used_bytes: What blocks, and what is counted with them, have taken at most since `begin`.
        """
        reachable = self.reachable_bytes
        others = int(self._module.max_memory_reserved(self._device)) - used_bytes
        return reachable - reachable // _MARGIN - others


def _module(device: torch.device) -> ModuleType | None:
    return getattr(torch, device.type, None)
