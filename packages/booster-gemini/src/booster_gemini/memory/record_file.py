"""What was where at each moment of a run, written as JSON lines for ``booster memory`` to draw."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_zero.engine import Key

_EVERY = 256
"""Lines that are written at once."""


class MemoryRecord:
    """Writes a rank's record into a folder.

    Args:
        folder: Where ``memory-rank0.jsonl`` and its like are written; made if it is not there.
        rank: This rank.
        facts: What the first line tells: budget and the like.
        device: The device that computes.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, facts: dict[str, Any], device: torch.device) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = (Path(folder) / f"memory-rank{rank}.jsonl").open("w", encoding="utf-8")
        self._lines: list[str] = []
        self._start = time.perf_counter()
        self._moment = ""
        self._step = 0
        self._device = device
        self._places: dict[Key, tuple[str, int]] = {}
        self._held = (-1, -1)
        self._write({"kind": "start", "rank": rank, "device": device.type, **facts})

    def moment(self, name: str) -> None:
        """Note what the model is doing."""
        if name != self._moment:
            self._moment = name
            self._write({"kind": "moment", "name": name})

    def note(self, places: Mapping[Key, tuple[str, int]], used_bytes: int, held_bytes: int) -> None:
        """Note what is where, if it has changed.

        Args:
            places: Where each block is, and its size in bytes.
            used_bytes: Bytes of blocks and reserved memory in the memory that computes.
            held_bytes: What is allocated for them.
        """
        now = self._now()  # one moment for all, so that nobody sees a block come before another has gone
        for key, place in places.items():
            if self._places.get(key) != place:
                self._write_block(now, key, *place)
        for key in self._places.keys() - places.keys():
            self._write_block(now, key, "nowhere", 0)
        self._places = dict(places)
        process_bytes = self._process_bytes()
        if (used_bytes, process_bytes) != self._held:
            self._held = (used_bytes, process_bytes)
            self._write({"kind": "bytes", "used": used_bytes, "held": held_bytes, "process": process_bytes}, now)

    def end_step(self, num_unplanned: int) -> None:
        """Note that a step has ended."""
        self._write({"kind": "step", "step": self._step, "unplanned": num_unplanned})
        self._step += 1
        self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._file.close()

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
        return round(time.perf_counter() - self._start, 6)

    def _write_block(self, now: float, key: Key, place: str, num_bytes: int) -> None:
        number, role = key
        self._write({"kind": "block", "chunk": number, "role": role.value, "place": place, "bytes": num_bytes}, now)

    def _write(self, entry: dict[str, Any], now: float | None = None) -> None:
        self._lines.append(json.dumps({"seconds": self._now() if now is None else now, **entry}))
        if len(self._lines) >= _EVERY:
            self._flush()

    def _flush(self) -> None:
        if self._lines and not self._file.closed:
            self._file.write("\n".join(self._lines) + "\n")
            self._file.flush()
            self._lines.clear()
