"""How long the collectives of a group wait for missing ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core.ranks import current_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def timeout_of(group: ProcessGroup) -> float:
    """Return the time limit of a group's collectives on the CPU in seconds, else that of the world."""
    try:
        backend: Any = group._get_backend(torch.device("cpu"))  # noqa: SLF001 - where torch keeps the time limit
        return float(backend.options._timeout.total_seconds())  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return current_world().timeout_seconds
