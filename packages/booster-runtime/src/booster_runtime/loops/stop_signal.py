"""`StopSignal`: let a signal end a training on all ranks after the same step, so that they can save together.

Schedulers of clusters and torchrun send SIGTERM some seconds before they kill. It reaches ranks at different moments,
or only some of them; a save on the ranks that know of it would wait for the others.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType

    from typing_extensions import Self

    from booster_core import Booster

__all__ = ["StopSignal"]

_T = TypeVar("_T")


class StopSignal:
    """Catches signals, and tells all ranks after the same step that one of them got one.

    Example::

        for batch in StopSignal(booster).until(loader):
            ...
            step += 1
        booster.save_checkpoint(root, step=step, model=model, optimizer=optimizer)

    Or, where loops are nested::

        with StopSignal(booster) as stop:
            for epoch in range(epochs):
                for batch in stop.until(loader):  # empty after a signal
                    ...
            booster.save_checkpoint(root, step=step, model=model, optimizer=optimizer)

    While it is open, the signals do nothing else, however often they come; afterwards they do what they did before.

    Args:
        booster: Of the run.
        signals: What to catch.
        every: Exchange only at every so many calls of `requested`, at least 1. An exchange is an all-reduce of one
            number; on a device it also waits for the work that is queued there.

    Raises:
        ConfigError: If ``every`` is not positive, or where it is entered outside of the main thread, which alone may
            catch signals.

    Collective: none; `requested` is.
    """

    def __init__(self, booster: Booster, signals: Sequence[signal.Signals] = (signal.SIGTERM,), every: int = 1) -> None:
        if every < 1:
            msg = f"`every={every}` is not a number of calls; use 1 or more."
            raise ConfigError(msg)
        self._booster = booster
        self._signals = tuple(signals)
        self._every = every
        self._num_calls = 0
        self._has_come = self._is_requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Catch the signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            msg = "`StopSignal` catches signals, which Python allows in the main thread only. Enter it there."
            raise ConfigError(msg)
        for each in self._signals:
            self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Let the signals do what they did before."""
        for each, handler in self._before.items():
            # None is a handler that was not installed from Python, which can't be put back.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def requested(self) -> bool:
        """Return whether any rank got a signal; the same on every rank.

        Collective: every rank of the world, equally often.
        """
        self._num_calls += 1
        if not self._is_requested and self._num_calls % self._every == 0:
            flag = torch.tensor([self._has_come], dtype=torch.int64, device=self._booster.device)
            if self._booster.context.coordinator.world_size > 1:
                collectives.all_reduce(flag, dist.ReduceOp.MAX).wait()
            self._is_requested = bool(flag.item())
        return self._is_requested

    def until(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield batches; none after the step in which any rank got a signal. It is opened meanwhile, unless it is open.

        Collective: every rank of the world, at each batch; ranks have equally many.
        """
        if self._is_requested:
            return
        with contextlib.nullcontext() if self._before else self:
            for batch in batches:
                yield batch
                if self.requested():
                    return

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._has_come = True
