"""How much of a device's memory is left for blocks: it is measured what everything else takes at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import ModuleType

_MARGIN = 10
"""One part in so many stays free, for what an allocator loses between blocks and for batches larger than the first."""

_STATISTICS = ("mem_get_info", "memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats")


class FreeMemory:
    """Measures what a device's memory is used for apart from blocks, such as activations.

    The device's peak is read and reset with each change of what blocks take, so that between two of these everything
    else is the difference. The peak that a script reads begins again with it.

    Args:
        device: An accelerator whose module tells free memory and peaks, as ``torch.cuda`` does; see `is_told`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = _module(device)
        self._most_else = 0

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
        """Begin an interval, in which blocks take as much from start to end."""
        self._module.reset_peak_memory_stats(self._device)

    def end(self, used_bytes: int) -> None:
        """End it.

        Args:
            used_bytes: What blocks, and what is counted with them, have taken meanwhile.
        """
        most = int(self._module.max_memory_allocated(self._device))
        self._most_else = max(self._most_else, most - used_bytes)

    @property
    def left_bytes(self) -> int:
        """What blocks may take where the rest takes as much as so far; 0 or less where nothing is left."""
        reachable = self.reachable_bytes
        return reachable - reachable // _MARGIN - self._most_else


def _module(device: torch.device) -> ModuleType | None:
    return getattr(torch, device.type, None)
