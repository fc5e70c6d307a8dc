"""`PipelineRecord`: when a rank did what in each batch, as a file that ``booster pipeline`` draws.

The file has a line of JSON for each batch, written when the batch has ended. On devices that work through queues the
times are the device's own, taken by events in the queue, so that recording never waits for it within a batch.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from booster_hybrid.pipeline.schedule import Action, Schedule


class PipelineRecord:
    """Notes the times of one rank's actions.

    Args:
        folder: Where ``pipeline-rank0.jsonl`` and its like are written; made if it does not exist.
        rank: This rank, in the world.
        index: Its position in its pipeline.
        pipeline: Which of the world's pipelines it works in.
        device: The device that computes.
    """

    def __init__(
        self, folder: str | os.PathLike[str], rank: int, index: int, pipeline: int, device: torch.device
    ) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._path = Path(folder) / f"pipeline-rank{rank}.jsonl"
        self._device = device
        self._number = 0
        self._began = 0.0
        self._origin: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []
        line = {"kind": "start", "rank": rank, "index": index, "pipeline": pipeline, "device": device.type}
        self._path.write_text(json.dumps(line) + "\n", encoding="utf-8")

    def begin(self) -> None:
        """Note that a batch begins."""
        self._marks = []
        self._began = time.time()
        self._origin = self._mark()

    @contextlib.contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Note how long an action computes."""
        start = self._mark()
        try:
            yield
        finally:
            self._marks.append((action, start, self._mark()))

    def end(self, schedule: Schedule) -> None:
        """Note that the batch has ended, and write it.

        Args:
            schedule: What was done in which order.

        Collective: none; waits for the device.
        """
        end = self._mark()
        line = {
            "kind": "batch",
            "number": self._number,
            "began": self._began,
            "seconds": self._seconds(end),
            "num_ranks": schedule.placement.num_ranks,
            "num_stages": schedule.placement.num_stages,
            "num_microbatches": schedule.num_microbatches,
            "actions": [
                [action.work.value, action.stage, action.microbatch, self._seconds(start), self._seconds(stop)]
                for action, start, stop in self._marks
            ],
        }
        self._marks = []
        self._number += 1
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        """Return when a mark was made, since the batch began."""
        if isinstance(mark, float):
            seconds: float = mark - self._origin
        else:
            mark.synchronize()
            seconds = self._origin.elapsed_time(mark) / 1e3
        return round(seconds, 7)
