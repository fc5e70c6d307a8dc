"""Speed and memory on a device, for ``python -m device_runs`` where this folder's parent is on its path.

The most important come first: what the time does not reach is left out.
"""

from __future__ import annotations

from device_speed import checkpoint_speed, memory_of_ranks, offload_speed, speed, vocabulary

CASES = [
    *speed.FIRST,
    *offload_speed.CASES,
    *speed.OF_EIGHT,
    *checkpoint_speed.CASES,
    *memory_of_ranks.CASES,
    *vocabulary.CASES,
    *speed.LATER,
]
