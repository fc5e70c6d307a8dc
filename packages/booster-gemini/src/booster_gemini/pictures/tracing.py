"""A run's record as a trace: moves as spans, bytes as counters, what the model did as slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_gemini.pictures.levels import least_of_process, samples
from booster_gemini.pictures.reading import MOVING
from booster_runtime.pictures import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from booster_gemini.pictures.reading import Record, Step

_TRACKS = {"coming": "moves in", "leaving": "moves out"}


def trace_of(record: Record, steps: Iterable[Step]) -> Trace:
    """Return the trace of some of a record's steps."""
    trace = Trace()
    rank = int(record.facts.get("rank", 0))
    device = record.facts.get("device", "cpu")
    trace.name_process(rank, f"rank {rank}")
    least = least_of_process(record)
    for step in steps:
        trace.slice(rank, "steps", f"step {step.number}", step.start, step.end, {"unplanned": step.unplanned})
        for start, end, phase in step.phases():
            trace.slice(rank, "model", phase, start, end)
        for start, end, name in step.uses():
            if name not in ("backward", "step"):
                trace.slice(rank, "model", name, start, end)
        for stay in step.stays:
            if stay.place in MOVING:
                what = {"chunk": stay.chunk, "bytes": stay.num_bytes}
                trace.span(rank, _TRACKS[stay.place], f"{stay.role} {stay.chunk}", stay.start, stay.end, what)
        for sample in samples(step, device, least):
            at = step.start + sample.seconds
            trace.counter(rank, f"bytes in {device}", at, sample.here)
            places = sorted({place for place, _ in sample.elsewhere})
            for place in places:
                held = {role: value for (where, role), value in sample.elsewhere.items() if where == place}
                trace.counter(rank, f"bytes on {place}", at, held)
    return trace
