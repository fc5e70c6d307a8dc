"""`PipelineRecord`: when a rank did what in each batch, as a trace.

A batch is written when it has ended. On devices that work through queues the times are the device's own, taken by
events in the queue, so that recording never waits for it within a batch.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from booster_runtime.trace import Trace

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from booster_hybrid.pipeline.schedule import Action, Schedule


class PipelineRecord:
    """Notes the times of one rank's actions.

    Args:
        folder: Where ``pipeline-rank0.trace.json`` and its like are written; made if it does not exist.
        rank: This rank, in the world.
        index: Its position in its pipeline.
        pipeline: Which of the world's pipelines it works in.
        device: The device that computes.
    """

    def __init__(
        self, folder: str | os.PathLike[str], rank: int, index: int, pipeline: int, device: torch.device
    ) -> None:
        self._trace = Trace(Path(folder) / f"pipeline-rank{rank}.trace.json", rank=rank)
        self._place = {"pipeline": pipeline, "index": index}
        self._device = device
        self._number = 0
        self._began = 0.0
        self._origin: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

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
        end = self._began + self._seconds(self._mark())
        parts = {"stages": schedule.placement.num_stages, "microbatches": schedule.num_microbatches}
        about: dict[str, Any] = {"batch": self._number, **self._place, **parts}
        self._trace.slice("batches", f"batch {self._number}", self._began, end, **about)
        for action, start, stop in self._marks:
            times = self._began + self._seconds(start), self._began + self._seconds(stop)
            done = {"batch": self._number, "stage": action.stage, "microbatch": action.microbatch}
            self._trace.slice(f"stage {action.stage}", f"{action.work.value} {action.microbatch}", *times, **done)
        self._marks = []
        self._number += 1
        self._trace.flush()

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
