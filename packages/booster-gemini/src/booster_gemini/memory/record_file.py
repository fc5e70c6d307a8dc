"""What was where at each moment of a run, written as a trace."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from booster_runtime.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_zero.engine import Key

_MOVES = {"coming": "moves in", "leaving": "moves out"}
"""The places of blocks on their way, which take room in the memory that computes too, and the tracks of these moves."""


class MemoryRecord:
    """Writes a rank's record into a folder: steps, phases and modules as slices, moves as spans, bytes as counters.

    Args:
        folder: Where ``memory-rank0.trace.json`` and its like are written; made if it is not there.
        rank: This rank.
        facts: What each step's slice tells: budget and policy.
        device: The device that computes.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, facts: dict[str, Any], device: torch.device) -> None:
        self._trace = Trace(Path(folder) / f"memory-rank{rank}.trace.json", rank=rank)
        self._facts, self._device = facts, device
        self._origin = time.time() - time.perf_counter()
        self._begun: dict[str, tuple[str, float]] = {}
        self._step = 0
        self._places: dict[Key, tuple[str, int]] = {}
        self._since: dict[Key, float] = {}
        self._held = (-1, -1)

    def moment(self, name: str) -> None:
        """Note what the model is doing."""
        now = self._now()
        self._go_on("steps", f"step {self._step}", now)
        self._go_on("phases", name if name in ("backward", "step") else "forward", now)
        self._go_on("model", name, now)

    def note(self, places: Mapping[Key, tuple[str, int]], used_bytes: int, held_bytes: int) -> None:
        """Note what is where, if it has changed.

        Args:
            places: Where each block is, and its size in bytes.
            used_bytes: Bytes of blocks and reserved memory in the memory that computes.
            held_bytes: What is allocated for them.
        """
        now = self._now()  # one moment for all, so that nobody sees a block come before another has gone
        changed = {key for key in {**self._places, **places} if self._places.get(key) != places.get(key)}
        for key in changed:
            place, num_bytes = self._places.get(key, ("", 0))
            if place in _MOVES:
                chunk, role = key
                name = f"{role.value} {chunk}"
                self._trace.span(_MOVES[place], name, self._since[key], now, chunk=chunk, bytes=num_bytes)
            self._since[key] = now
        self._places = dict(places)
        process_bytes = self._process_bytes()
        if not changed and (used_bytes, process_bytes) == self._held:
            return
        self._held = (used_bytes, process_bytes)
        found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for (_, role), (place, num_bytes) in places.items():
            if place == "nowhere":  # without values
                continue
            found[self._device.type if place in _MOVES else place][role.value] += num_bytes
        here = found[self._device.type]
        here["gathered"] = max(used_bytes - sum(here.values()), 0)
        for place, values in found.items():
            self._trace.counter(f"bytes in {place}", now, values)
        self._trace.counter("allocated for chunks", now, {"bytes": held_bytes})
        if process_bytes:
            self._trace.counter("bytes of the process", now, {"bytes": process_bytes})

    def end_step(self, num_unplanned: int) -> None:
        """Note that a step has ended."""
        now = self._now()
        for track in ("model", "phases"):
            self._end(track, now)
        self._end("steps", now, unplanned=num_unplanned, **self._facts)
        self._step += 1
        self._trace.flush()

    def close(self) -> None:
        """Write what is left."""
        self._trace.flush()

    def _go_on(self, track: str, name: str, now: float) -> None:
        """Begin an activity of a track where another one ends, unless it is the same."""
        if self._begun.get(track, ("", 0.0))[0] != name:
            self._end(track, now)
            self._begun[track] = name, now

    def _end(self, track: str, now: float, **args: Any) -> None:
        if track in self._begun:
            name, start = self._begun.pop(track)
            self._trace.slice(track, name, start, now, **args)

    def _process_bytes(self) -> int:
        """Return what the process has in the memory that computes, ours and others'; 0 where nobody tells."""
        if self._device.type == "cpu":
            try:
                _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
            except OSError:  # a system without it
                return 0
            return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
        allocated = getattr(getattr(torch, self._device.type, None), "memory_allocated", None)
        return 0 if allocated is None else int(allocated(self._device))

    def _now(self) -> float:
        return self._origin + time.perf_counter()
