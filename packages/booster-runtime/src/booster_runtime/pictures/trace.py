"""`Trace`: what happened when, in the JSON format that Perfetto and chrome://tracing open.

The format is Chrome's "Trace Event Format": a list of events, times in microseconds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MICROSECONDS = 1e6


class Trace:
    """Events on tracks of processes, such as ranks.

    Times are seconds since any fixed moment. A *slice* is one activity of a track; slices of a track follow each other
    or nest. A *span* may overlap others. A *counter* is one value, or several stacked values, over time.
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[tuple[int, str], int] = {}
        self._num_spans = 0

    def name_process(self, process: int, name: str) -> None:
        """Name a process, such as a rank."""
        self._events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})

    def slice(
        self, process: int, track: str, name: str, start: float, end: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Add one activity of a track, from ``start`` to ``end``."""
        self._add("X", process, track, name, start, {"dur": (end - start) * _MICROSECONDS, "args": dict(args or {})})

    def span(
        self, process: int, track: str, name: str, start: float, end: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Add an activity from ``start`` to ``end`` that may overlap others of the track."""
        self._num_spans += 1
        common = {"cat": track, "id": self._num_spans}
        self._add("b", process, track, name, start, {**common, "args": dict(args or {})})
        self._add("e", process, track, name, end, common)

    def counter(self, process: int, name: str, at: float, values: Mapping[str, float]) -> None:
        """Say which values a counter has from a moment on."""
        event = {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": at * _MICROSECONDS, "args": dict(values)}
        self._events.append(event)

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _add(self, phase: str, process: int, track: str, name: str, at: float, more: Mapping[str, Any]) -> None:
        thread = self._tracks.get((process, track))
        if thread is None:
            thread = self._tracks[process, track] = 1 + sum(known == process for known, _ in self._tracks)
            names = {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": track}}
            self._events.append(names)
        event = {"ph": phase, "name": name, "pid": process, "tid": thread, "ts": at * _MICROSECONDS, **more}
        self._events.append(event)
