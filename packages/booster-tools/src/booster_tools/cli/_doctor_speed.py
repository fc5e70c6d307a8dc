"""What ``booster doctor`` measures, and which figures it calls slow.

Each is far below what any usable machine does before it is called slow; the figures are for comparing machines.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_REPEATS = 5
_SLOWEST_BYTES_PER_SECOND = {"reduce-scatter": 50e6, "disk": 20e6}
_LONGEST_SECONDS = {"message": 5e-3, "meeting": 50e-3}
_LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Measured:
    """What a check found, and whether it is slow."""

    text: str
    is_slow: bool


def median_seconds(device: torch.device, call: Callable[[], None]) -> float:
    """Return the median seconds of a call on a device, after one that is not timed.

    Collective: as the call.
    """
    seconds = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[1:])[_REPEATS // 2]


def rate_of(nbytes: int, seconds: float, kind: str) -> Measured:
    """Return how many bytes a second were summed over the ranks, or written to the disk."""
    rate = nbytes / seconds
    return Measured(f"{rate / 1e6:.0f} MB/s", rate < _SLOWEST_BYTES_PER_SECOND[kind])


def delay_of(seconds: float, kind: str) -> Measured:
    """Return how long a message or a meeting took."""
    return Measured(f"{seconds * 1e3:.2f} ms", seconds > _LONGEST_SECONDS[kind])


def with_free_space(rate: Measured, folder: Path) -> Measured:
    """Return a rate of writing with the space that is left where a folder is; too little is called slow, too."""
    free = shutil.disk_usage(folder).free
    return Measured(f"{rate.text}, {free / 2**30:.1f} GiB free", rate.is_slow or free < _LEAST_FREE_BYTES)
