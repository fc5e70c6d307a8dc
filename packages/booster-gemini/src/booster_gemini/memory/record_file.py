"""What lay where at each moment of a run, written as JSON lines for ``booster memory`` to draw."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

_EVERY = 256
"""Lines that are written at once."""


class MemoryRecord:
    """Writes a rank's record into a folder.

    Args:
        folder: Where ``memory-rank0.jsonl`` and its like are to lie; made where it is not there.
        rank: This rank.
        facts: What the first line tells: budget and the like.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, facts: dict[str, Any]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = (Path(folder) / f"memory-rank{rank}.jsonl").open("w", encoding="utf-8")
        self._lines: list[str] = []
        self._start = time.perf_counter()
        self._moment = ""
        self._step = 0
        self._last: dict[str, int] = {}
        self._write({"kind": "start", "rank": rank, **facts})

    def moment(self, name: str) -> None:
        """Note what the model is doing."""
        if name != self._moment:
            self._moment = name
            self._write({"kind": "moment", "name": name})

    def note(self, places: dict[str, int], used_bytes: int, other_bytes: int | None = None) -> None:
        """Note what lies where, where it has changed.

        Args:
            places: Bytes of blocks by memory.
            used_bytes: Bytes of blocks and reserved memory in the memory that computes.
            other_bytes: Memory of the model's own, such as activations; ``None`` where it is not known.
        """
        now = {**places, "used": used_bytes}
        if other_bytes is not None:
            now["other"] = other_bytes
        if now != self._last:
            self._last = now
            self._write({"kind": "bytes", **now})

    def end_step(self, num_unplanned: int) -> None:
        """Note that a step has ended."""
        self._write({"kind": "step", "step": self._step, "unplanned": num_unplanned})
        self._step += 1
        self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._lines.append(json.dumps({"seconds": round(time.perf_counter() - self._start, 6), **entry}))
        if len(self._lines) >= _EVERY:
            self._flush()

    def _flush(self) -> None:
        if self._lines and not self._file.closed:
            self._file.write("\n".join(self._lines) + "\n")
            self._file.flush()
            self._lines.clear()
