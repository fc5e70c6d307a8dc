"""`watch_memory`: what a rank's memory holds at each moment of some steps, under any plugin, as a trace."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper
from booster_core.ranks import DistCoordinator
from booster_runtime.trace import Trace

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

_STATUS = Path("/proc/self/statm")


def watch_memory(model: nn.Module, folder: str | Path, *, interval_seconds: float = 0.002) -> MemoryTimeline:
    """Sample this rank's memory in a ``with``, and write it over time with the phases of each step.

    On CUDA devices it is what torch's allocator has allocated; else the anonymous resident memory of the process, which
    freed memory may stay in for a while. Watch a few steps: samples are kept until the end of the block. It writes
    ``step-memory-rankN.trace.json``, which Perfetto (ui.perfetto.dev) opens.

    Example::

        with watch_memory(model, "run"):
            for _, batch in zip(range(3), dataloader):
                ...

    Args:
        model: The boosted model, whose calls are the forward phase.
        folder: Where to write, on each rank's host.
        interval_seconds: Time between samples, taken by a thread.

    Raises:
        TypeError: If the model is not a boosted one.
        ConfigError: If the interval is not positive, or this machine tells no process how much memory it has.

    Collective: none; on the ranks that are to be watched.
    """
    if not isinstance(model, ModelWrapper):
        msg = f"`watch_memory` needs the model returned by `Booster.boost`; got `{type(model).__name__}`."
        raise TypeError(msg)
    if not 0 < interval_seconds < float("inf"):
        msg = f"`interval_seconds={interval_seconds}` is not a positive, finite number of seconds."
        raise ConfigError(msg)
    device = next((each.device for each in model.parameters() if each.device.type != "cpu"), None)
    if device is None and not _STATUS.exists():
        msg = f"Without an accelerator, `watch_memory` reads {_STATUS}, which only Linux has."
        raise ConfigError(msg)
    return MemoryTimeline(model, Path(folder), interval_seconds, device)


class Phase(NamedTuple):
    """A part of a training step, in seconds since the first sample."""

    name: str
    start: float
    end: float


class MemoryTimeline:
    """Samples of memory, and the phases of steps; made by `watch_memory`.

    Attributes:
        samples: Seconds since the start, and bytes at that moment.
        phases: The forward passes, and the times from the last forward to the end of each optimizer step.
    """

    def __init__(self, model: ModelWrapper, folder: Path, interval_seconds: float, device: torch.device | None) -> None:
        self.samples: list[tuple[float, int]] = []
        self.phases: list[Phase] = []
        self._model = model
        self._folder = folder
        self._interval_seconds = interval_seconds
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="booster memory timeline", daemon=True)
        self._handles: list[RemovableHandle] = []
        self._start = self._since = 0.0

    def __enter__(self) -> Self:
        """Begin to sample."""
        self._start = time.perf_counter()
        self._handles = [
            self._model.register_forward_pre_hook(self._begin_forward),
            self._model.register_forward_hook(self._end_forward),
        ]
        for optimizer in self._model.boosted_optimizers:
            optimizer.on_step.append(self._end_step)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End sampling, and write the trace, unless the block raised."""
        self._stop.set()
        self._thread.join()
        for optimizer in self._model.boosted_optimizers:
            optimizer.on_step.remove(self._end_step)
        for handle in self._handles:
            handle.remove()
        if kind is not None:
            return
        rank = DistCoordinator().rank
        trace = Trace(self._folder / f"step-memory-rank{rank}.trace.json", rank=rank)
        where = "process" if self._device is None else f"device {self._device}"
        origin = time.time() - self._now()
        for phase in self.phases:
            trace.slice("phases", phase.name, origin + phase.start, origin + phase.end)
        for at, nbytes in self.samples:
            trace.counter(f"memory of the {where}", origin + at, {"bytes": nbytes})
        trace.flush()

    def _end_step(self, *_: Any) -> None:
        self._end_phase("backward and step")

    def _begin_forward(self, *_: Any) -> None:
        self._since = self._now()

    def _end_forward(self, *_: Any) -> None:
        self._end_phase("forward")

    def _end_phase(self, name: str) -> None:
        now = self._now()
        self.phases.append(Phase(name, self._since, now))
        self._since = now

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _sample(self) -> None:
        while True:
            self.samples.append((self._now(), self._bytes()))
            if self._stop.wait(self._interval_seconds):
                self.samples.append((self._now(), self._bytes()))
                return

    def _bytes(self) -> int:
        if self._device is not None:
            allocated: int = torch.get_device_module(self._device).memory_allocated(self._device)
            return allocated
        _, resident, shared, *_ = map(int, _STATUS.read_text(encoding="ascii").split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
