"""What torch allocates on the CPU in a block of code: exact, where the kernel's view includes what malloc keeps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Allocated:
    """The bytes of tensors above those at the block's start, at the most; filled in when the block ends."""

    peak_bytes: int = 0


@contextlib.contextmanager
def peak_allocated() -> Iterator[Allocated]:
    """Add up what torch's allocator hands out and gets back, in the order of time, in all threads that compute."""
    found = Allocated()
    # Without `acc_events`, torch 2.10 warns that a second cycle would drop the events of the first.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield found
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        found.peak_bytes = max(found.peak_bytes, held)
