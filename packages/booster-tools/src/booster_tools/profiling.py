"""`profile`: torch's profiler over some steps of a run, with the parts of a step as named ranges.

The ranges are those of the calls and collectives that any observer sees: nothing is added to a step without a profile.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, record_function, supported_activities
from torch.profiler import profile as torch_profile
from torch.profiler import schedule as torch_schedule

from booster_core.errors import ConfigError
from booster_core.plugin import hookimpl, register_hooks, unregister_hooks
from booster_core.ranks import observed_by

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from booster_core import Booster
    from booster_core.ranks import ObservedCall

_RANGES = {
    "all_gather": "gather",
    "all_gather_object": "gather",
    "all_reduce": "reduce",
    "reduce_scatter": "reduce",
    "gather of parameters": "gather",
    "reduction of gradients": "reduce",
}
"""What calls are called in a trace; others keep their names."""


@contextlib.contextmanager
def profile(
    booster: Booster, folder: str | Path, *, wait: int = 1, warmup: int = 1, active: int = 3
) -> Iterator[torch_profile]:
    """Record the optimizer steps of a block with torch's profiler, with the parts of each step as named ranges.

    Ranges are ``forward``, ``backward``, ``clip_grad_by_norm``, ``step``, ``save``, ``gather`` and ``reduce``, each
    after ``booster:``. At its end each rank has written ``trace-rank0.json``, with its own number; Perfetto opens it.

    Args:
        booster: Of the run; its device and rank are used.
        folder: Where traces go.
        wait: Number of steps to leave out.
        warmup: Number of further steps that are recorded and dropped.
        active: Number of steps to keep.

    Yields:
        Torch's profiler.

    Raises:
        ConfigError: If a number is out of range; or at the end, if the block took too few steps for a trace.
    """
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            msg = f"`{name}={value!r}` of `booster_tools.profile` is no number of steps; use {least} or more."
            raise ConfigError(msg)
    target = Path(folder) / f"trace-rank{booster.context.coordinator.rank}.json"
    target.parent.mkdir(parents=True, exist_ok=True)

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(target))

    here = supported_activities()  # type: ignore[no-untyped-call]
    activities = {ProfilerActivity.CPU} if booster.device.type == "cpu" else here
    schedule = torch_schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(observed_by(_Ranges()))
        made = torch_profile(activities=activities, schedule=schedule, on_trace_ready=write)
        with _one_cycle():
            profiler = stack.enter_context(made)
        steps = _Steps(profiler)
        register_hooks(steps)
        stack.callback(unregister_hooks, steps)
        yield profiler
    if steps.num_taken <= wait + warmup:
        msg = (
            f"`booster_tools.profile` wrote no trace: the block took {steps.num_taken} optimizer step(s), and "
            f"`wait={wait}` and `warmup={warmup}` leave out the first {wait + warmup}. Lower them, or take more steps."
        )
        raise ConfigError(msg)


class _Ranges:
    """Makes each call a range of the trace."""

    def during(self, call: ObservedCall) -> AbstractContextManager[object]:
        """Return the range of a call."""
        return record_function(f"booster:{_RANGES.get(call.name, call.name)}")


class _Steps:
    """Tells the profiler where an optimizer step ends."""

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler
        self.num_taken = 0

    @hookimpl
    def after_step(self) -> None:
        """Go on to the next step."""
        self.num_taken += 1
        with _one_cycle():
            self._profiler.step()


@contextlib.contextmanager
def _one_cycle() -> Iterator[None]:
    """Ignore torch 2.10's warning that a second cycle would drop the events of the first: there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events at the end of each cycle")
        yield
