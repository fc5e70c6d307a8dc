"""`profile`: torch's profiler over some steps of a run, with the parts of a step as named ranges.

The ranges are put around the calls that `naming_missing_ranks`, boosted models and transports see anyway, while a
profile runs: nothing is added to a step without one.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile
from torch.profiler import schedule as torch_schedule

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper, hookimpl, register_hooks, unregister_hooks
from booster_core.ranks import naming_missing_ranks
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from booster_core import Booster

_SAVES = ("save_checkpoint", "save_lora_as_pretrained", "save_model", "save_optimizer")
_RANGES = {
    "all_gather": "gather",
    "all_gather_object": "gather",
    "all_reduce": "reduce",
    "reduce_scatter": "reduce",
    "reduce_scatter_parts": "reduce",
    "gather of parameters": "gather",
    "reduction of gradients": "reduce",
}
"""What calls are called in a trace; others keep their names."""


@contextlib.contextmanager
def profile(booster: Booster, folder: str | Path, *, wait: int, warmup: int, active: int) -> Iterator[Any]:
    """Profile the optimizer steps of a block; see `Booster.profile`."""
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            msg = f"`{name}={value!r}` of `Booster.profile` is no number of steps; use {least} or more."
            raise ConfigError(msg)
    target = Path(folder) / f"trace-rank{booster.context.coordinator.rank}.json"
    target.parent.mkdir(parents=True, exist_ok=True)

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(target))

    activities = [ProfilerActivity.CPU]
    if booster.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    schedule = torch_schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_named_calls())
        stack.enter_context(_named_forwards())
        stack.enter_context(_named_saves(booster))
        stack.enter_context(_named_collectives())
        made = torch_profile(activities=activities, schedule=schedule, on_trace_ready=write)
        with _one_cycle():
            profiler = stack.enter_context(made)
        steps = _Steps(profiler)
        register_hooks(steps)
        stack.callback(unregister_hooks, steps)
        yield profiler


class _Steps:
    """Tells the profiler where an optimizer step ends."""

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler

    @hookimpl
    def after_step(self) -> None:
        """Go on to the next step."""
        with _one_cycle():
            self._profiler.step()


@contextlib.contextmanager
def _one_cycle() -> Iterator[None]:
    """Ignore torch 2.10's warning that a second cycle would drop the events of the first: there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events at the end of each cycle")
        yield


@contextlib.contextmanager
def _named_calls() -> Iterator[None]:
    """Let the calls that name missing ranks be ranges as well."""
    enter, leave = naming_missing_ranks.__enter__, naming_missing_ranks.__exit__
    ranges: list[Any] = []  # calls nest

    def enter_range(self: naming_missing_ranks) -> None:
        # Not every plugin names its forward: all models do so below.
        ranges.append(contextlib.nullcontext() if self._name == "forward" else _range(self._name))
        ranges[-1].__enter__()
        enter(self)

    def leave_range(self: naming_missing_ranks, *error: Any) -> None:
        try:
            leave(self, *error)
        finally:
            if ranges:
                ranges.pop().__exit__(None, None, None)

    naming_missing_ranks.__enter__ = enter_range  # type: ignore[method-assign]
    naming_missing_ranks.__exit__ = leave_range  # type: ignore[method-assign]
    try:
        yield
    finally:
        naming_missing_ranks.__enter__ = enter  # type: ignore[method-assign]
        naming_missing_ranks.__exit__ = leave  # type: ignore[method-assign]


@contextlib.contextmanager
def _named_forwards() -> Iterator[None]:
    """Let the forward of boosted models be a range."""
    wrapper: Any = ModelWrapper
    call = wrapper.__call__

    def call_range(self: ModelWrapper, *args: Any, **kwargs: Any) -> Any:
        with _range("forward"):
            return call(self, *args, **kwargs)

    wrapper.__call__ = call_range
    try:
        yield
    finally:
        del wrapper.__call__  # it is inherited


@contextlib.contextmanager
def _named_saves(booster: Booster) -> Iterator[None]:
    """Let the saving methods of a Booster be ranges."""

    def ranged(save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def run(*args: Any, **kwargs: Any) -> None:
            with _range("save"):
                save(*args, **kwargs)

        return run

    for name in _SAVES:
        setattr(booster, name, ranged(getattr(booster, name)))
    try:
        yield
    finally:
        for name in _SAVES:
            delattr(booster, name)


@contextlib.contextmanager
def _named_collectives() -> Iterator[None]:
    """Let the operations of transports be ranges; waiting for one is a range of the same name."""
    module: Any = collectives
    find = module.transport_of
    module.transport_of = lambda group: _NamedTransport(find(group))
    try:
        yield
    finally:
        module.transport_of = find


class _NamedTransport:
    """A transport whose operations are ranges."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._transport, name)
        if not callable(operation):
            return operation

        def run(*args: Any, **kwargs: Any) -> Any:
            with _range(name):
                pending = operation(*args, **kwargs)
            if isinstance(pending, collectives.Pending):
                return collectives.Pending([_NamedWait(name, pending)])
            return pending

        return run


class _NamedWait:
    """Waiting for an operation, as a range."""

    def __init__(self, name: str, pending: collectives.Pending) -> None:
        self._name, self._pending = name, pending

    def wait(self) -> None:
        with _range(self._name):
            self._pending.wait()


def _range(name: str) -> Any:
    return record_function(f"booster:{_RANGES.get(name, name)}")
