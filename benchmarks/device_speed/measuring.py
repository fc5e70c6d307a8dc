"""How timed cases measure: runs in turns, by the device's own clock, with the peak of its memory and its kernels.

A run is a function that trains one step. Two or more take turns (A B A B ...), so that what changes with time, such as
the card's clock rate, affects all of them; `Figure` divides round by round.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from device_runs.cases import CannotRun, Figure, Incomplete

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from device_runs.cases import Setting

Step = Callable[[], Any]
_STEPS = 2
"""Timed steps of a turn. One more goes ahead, so that the host is ahead of the device as in a long run."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 12


class Clock:
    """What is left of a case's time, so that it ends by itself with what it has measured.

    Args:
        setting: The device. There is no limit on the simulated accelerator.
        seconds: From now on.
    """

    def __init__(self, setting: Setting, seconds: float) -> None:
        self._end = time.monotonic() + (seconds if setting.is_real else math.inf)

    @property
    def left(self) -> float:
        """Seconds that are left; negative afterwards."""
        return self._end - time.monotonic()


class Results:
    """The figures of a case whose parts fail one by one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.figures: list[Figure] = []
        self._failures: list[str] = []
        self._left_out: list[str] = []

    def attempts(self, names: Sequence[str]) -> Iterator[tuple[str, Attempt]]:
        """Yield each name with a block that measures it; leave out the others when the time is over."""
        for place, name in enumerate(names):
            if self._clock.left <= 0:
                self._failures.append(f"no time was left for {', '.join(names[place:])}")
                return
            yield name, Attempt(self, name)

    def failed(self, name: str, error: BaseException) -> None:
        """Note that a part failed, or can't run here."""
        if isinstance(error, CannotRun):
            self._left_out.append(f"{name}: {error}")
            return
        last = traceback.format_exception(error)[-12:]
        self._failures.append(f"{name}:\n{''.join(last)}")

    def end(self) -> list[Figure]:
        """Return the figures.

        Raises:
            Incomplete: If a part failed; the figures of the others are kept.
            CannotRun: If there are no figures, and nothing failed.
        """
        print("\n".join(self._left_out), flush=True)
        if self._failures:
            raise Incomplete("\n".join(self._failures), self.figures)
        if not self.figures:
            raise CannotRun("; ".join(self._left_out))
        return self.figures


class Attempt:
    """A block whose error is noted, and does not end the case; see `Results.attempts`."""

    def __init__(self, results: Results, name: str) -> None:
        self._results, self._name = results, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._results.failed(self._name, error)
        # Its frames hold the model that failed, whose memory the next one needs.
        traceback.clear_frames(error.__traceback__)
        return True


def synchronize(setting: Setting) -> None:
    """Wait until the device has done all its work."""
    setting.module.synchronize()


def forget(setting: Setting) -> None:
    """Return the memory of objects that were deleted just before."""
    synchronize(setting)
    gc.collect()
    setting.module.empty_cache()


def turn(setting: Setting, step: Step, steps: int = _STEPS, ahead: int = 1) -> float:
    """Return the seconds of a step: the mean over some, on the device's clock.

    Args:
        setting: The device.
        step: Trains a step.
        steps: How many are timed.
        ahead: How many go ahead of these.
    """
    synchronize(setting)
    for _ in range(ahead):
        step()
    if not setting.is_real:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(setting)
        return (time.perf_counter() - start) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / steps


def in_turns(
    setting: Setting, runs: Mapping[str, Step], seconds: float, *, steps: int = _STEPS, ahead: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of a step of each run, one value a round.

    Args:
        setting: The device.
        runs: Each has trained some steps before.
        seconds: About how long all rounds take.
        steps: As for `turn`.
        ahead: As for `turn`.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.monotonic() + seconds
    most, least = (_MOST_ROUNDS, _LEAST_ROUNDS) if setting.is_real else (2, 2)
    while len(next(iter(times.values()))) < most:
        for name, step in runs.items():
            times[name].append(turn(setting, step, steps, ahead))
        if time.monotonic() > end and len(next(iter(times.values()))) >= least:
            break
    return times


class Peak:
    """The most device memory that was allocated above what was allocated at first.

    Args:
        setting: The device.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._module = setting, setting.module
        forget(setting)
        self._before = self._module.memory_allocated()
        self._reserved_before = self._module.memory_reserved()
        self._module.reset_peak_memory_stats()

    def restart(self) -> None:
        """Return free memory to the device, and look for the most from now on."""
        forget(self._setting)
        self._module.reset_peak_memory_stats()

    @property
    def num_bytes(self) -> int:
        """Bytes, so far."""
        return int(self._module.max_memory_allocated()) - self._before

    @property
    def reserved_bytes(self) -> int:
        """The most that torch's allocator held, so far; what it holds now on the simulated accelerator."""
        module = self._module
        held = module.max_memory_reserved() if self._setting.is_real else module.memory_reserved()
        return int(held) - self._reserved_before

    @property
    def remaining(self) -> int:
        """Bytes that are still allocated once what was deleted has returned its memory."""
        forget(self._setting)
        return int(self._module.memory_allocated()) - self._before


@dataclass(frozen=True)
class DeviceWork:
    """What a step does on the device, as torch's profiler sees it.

    Attributes:
        kernels: Number of kernels, copies and fills.
        seconds: Their time, added up.
        link_seconds: That of copies from and to the host.
        waits: How often the host waits for the device.
    """

    kernels: int
    seconds: float
    link_seconds: float
    waits: int


def device_work(setting: Setting, step: Step) -> DeviceWork | None:
    """Return what a step does; ``None`` where the profiler can't see the device."""
    if not setting.is_real:
        step()
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    synchronize(setting)
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step()
            synchronize(setting)
    except (RuntimeError, AssertionError) as error:
        print(f"torch's profiler can't run here: {error}", flush=True)
        return None
    events = found.events()
    work = [each for each in events if each.device_type == DeviceType.CUDA]
    waits = [each for each in events if each.device_type == DeviceType.CPU and each.name in _WAITS]
    if not work:
        return None
    links = [each for each in work if "Memcpy" in each.name and ("DtoH" in each.name or "HtoD" in each.name)]
    seconds, link_seconds = (sum(each.time_range.elapsed_us() for each in some) / 1e6 for some in (work, links))
    return DeviceWork(len(work), seconds, link_seconds, len(waits))


_WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
"""Not ``cudaDeviceSynchronize``, which the profiler calls itself."""
