"""`Trace`: what a rank did when, in a file that Perfetto and chrome://tracing open at any moment.

The format is Chrome's "Trace Event Format": a JSON array of events, one a line, times in microseconds. Its closing
bracket is optional, so that the file of a run that goes on, or was killed, is whole.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Trace", "read_traces"]

_MICROSECONDS = 1e6
_EVERY = 256
"""Events that are written at once."""


class Trace:
    """Writes a rank's events, on tracks, to a file.

    Times are those of ``time.time()``, so that the traces of ranks can be shown together. A *slice* is one activity of
    a track; slices of a track follow each other or nest.

    Args:
        path: The file; another one of that name is replaced, and its folder is made.
        rank: Of the process.
    """

    def __init__(self, path: Path, *, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._rank = path, rank
        self._lines: list[str] = []
        self._tracks: dict[str, int] = {}
        event = {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        path.write_text(f"[\n{json.dumps(event)}", encoding="utf-8")

    def slice(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        """Add one activity of a track, from ``start`` to ``end``."""
        self._add("X", track, name, start, dur=(end - start) * _MICROSECONDS, args=args)

    def flush(self) -> None:
        """Write the events that are not written yet."""
        if self._lines:
            with self._path.open("a", encoding="utf-8") as file:  # open no longer than needed: a run may never end it
                file.write("".join(f",\n{line}" for line in self._lines))
            self._lines.clear()

    def _add(self, phase: str, track: str, name: str, at: float, **more: Any) -> None:
        thread = self._tracks.get(track)
        if thread is None:
            thread = self._tracks[track] = 1 + len(self._tracks)
            names = {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": thread, "args": {"name": track}}
            self._write(names)
        event = {"ph": phase, "name": name, "pid": self._rank, "tid": thread, "ts": at * _MICROSECONDS, **more}
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        self._lines.append(json.dumps(event))
        if len(self._lines) >= _EVERY:
            self.flush()


def read_traces(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all traces of ranks in a folder; a last line that was cut off by a kill is left out.

    Raises:
        ConfigError: If there is no trace, or one can't be read.
    """
    paths = sorted(folder.glob("*-rank*.trace.json"))
    if not paths:
        msg = f"'{folder}' holds no *-rank*.trace.json. Name that of `HybridParallelPlugin(pipeline_record=...)`."
        raise ConfigError(msg)
    return [event for path in paths for event in _read(path)]


def _read(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the events of one rank's trace; see `read_traces`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[1:], 2):
        try:
            event = json.loads(line.removesuffix(","))
            yield {**event, "pid": int(event["pid"])}
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                return
            msg = f"Line {number} of '{path}' is no event of a trace: {type(error).__name__}: {error}."
            raise ConfigError(msg) from error
