"""`track`: hand each optimizer step's metrics, and values of the loop, to trackers."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import OptimizerWrapper, hookimpl, register_hooks, unregister_hooks
from booster_core.ranks import DistCoordinator
from booster_tools.tracking.interface import Meter, Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer
    from typing_extensions import Self

_OURS = frozenset({"step", "seconds"})


def track(
    optimizer: Optimizer,
    *trackers: Tracker,
    meters: Sequence[Meter] = (),
    config: Mapping[str, Any] | None = None,
    step: int = 0,
) -> TrackedRun:
    """Track the steps of an optimizer from now on, until the end of a ``with``.

    Of each step trackers receive ``grad_norm`` where the loop asked for it (``clip_grad_by_norm``, ``grad_norm()``),
    ``skipped`` and ``loss_scale`` where there is a dynamic loss scale, ``lr``, ``seconds`` since the step before, and
    what is logged between it and the next step. Tensors are read when the next step has been taken, so that logging a
    loss does not wait for the device.

    Example::

        with track(optimizer, JsonLines("runs/1/metrics.jsonl")) as run:
            for batch in dataloader:
                ...
                optimizer.step()
                run.log(loss=loss)

    Args:
        optimizer: The boosted optimizer whose steps count.
        trackers: Where values go. They are used on the master rank only, so a loop needs no ``if``.
        meters: Add values to each step, such as `Throughput`.
        config: Settings of the run, by name, for trackers that show them.
        step: Number of steps taken before, such as the step of the checkpoint that was loaded.

    Raises:
        TypeError: If the optimizer is not a boosted one, a tracker no `Tracker`, or a meter no `Meter`.
        ConfigError: If ``step`` is negative, or a tracker's package is not installed.

    Collective: none; called on every rank.
    """
    if not isinstance(optimizer, OptimizerWrapper):
        msg = f"`track` needs the optimizer returned by `Booster.boost`; got `{type(optimizer).__name__}`."
        raise TypeError(msg)
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            msg = f"A tracker is an object such as `JsonLines(path)`; got `{type(tracker).__name__}`."
            raise TypeError(msg)
    for meter in meters:
        if not isinstance(meter, Meter):
            msg = f"A meter is an object such as `Throughput(booster, model)`; got `{type(meter).__name__}`."
            raise TypeError(msg)
    if step < 0:
        msg = f"`step={step}` is not a number of steps taken; use 0 or more."
        raise ConfigError(msg)
    return TrackedRun(optimizer, trackers if DistCoordinator().is_master() else (), meters, config or {}, step)


class TrackedRun:
    """A run whose values go to trackers; made by `track`.

    Attributes:
        step: Number of steps taken, with those before the run.
    """

    def __init__(
        self,
        optimizer: OptimizerWrapper,
        trackers: tuple[Tracker, ...],
        meters: Sequence[Meter],
        config: Mapping[str, Any],
        step: int,
    ) -> None:
        self.step = step
        self._optimizer = optimizer
        self._trackers = trackers
        self._meters = meters
        self._config = config
        self._is_open = False
        self._values: dict[str, float | Tensor] = {}
        self._time = time.perf_counter()

    def __enter__(self) -> Self:
        """Start the trackers."""
        with contextlib.ExitStack() as started:
            for tracker in self._trackers:
                started.callback(tracker.close)
                tracker.start(self.step)
                if self._config:
                    tracker.configure(self._config)
            for meter in self._meters:
                meter.start()
                started.callback(meter.stop)
            register_hooks(self)
            started.pop_all()
        self._time = time.perf_counter()
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        """Write the values of the last step, and close the trackers."""
        self._is_open = False
        unregister_hooks(self)
        with contextlib.ExitStack() as closing:
            for tracker in self._trackers:
                closing.callback(tracker.close)
            for meter in self._meters:
                closing.callback(meter.stop)
            self._write()

    def log(self, **values: float | Tensor) -> None:
        """Add values to the step that was taken last.

        Args:
            values: Numbers and scalar tensors, by name; before the first step they count as values of the step before.

        Raises:
            TypeError: If a value is neither a number nor a tensor with one element.
            ConfigError: Outside of the ``with``, or if a name is one that every step has: ``step``, ``seconds``.

        Collective: none. Values of the master rank are tracked: reduce what differs between ranks, or take what
        `train_batch` and `evaluate_batch` return.
        """
        if not self._is_open:
            msg = "Values are tracked inside of a block only: `with track(optimizer, ...) as run:`."
            raise ConfigError(msg)
        if taken := _OURS.intersection(values):
            msg = f"Every step has a value named '{min(taken)}' already. Choose another name."
            raise ConfigError(msg)
        for name, value in values.items():
            if not (isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)):
                msg = f"`{name}` must be a number or a scalar tensor to be tracked; got `{type(value).__name__}`."
                raise TypeError(msg)
            # a copy, because the next step may write to the tensor
            self._values[name] = value.detach().clone() if isinstance(value, torch.Tensor) else float(value)

    @hookimpl
    def after_step(self, optimizer: Optimizer, metrics: Mapping[str, Any]) -> None:
        """Hand over the values of the step before, and begin with those of this one."""
        if optimizer is not self._optimizer:
            return
        self._write()
        self.step += 1
        now = time.perf_counter()
        seconds = now - self._time
        self._values = {"seconds": seconds, **_learning_rates(optimizer)}
        self._time = now
        if "loss_scale" not in metrics:
            metrics = {name: value for name, value in metrics.items() if name != "skipped"}
        self.log(**metrics)
        for meter in self._meters:
            self.log(**meter.measure(seconds, metrics))

    def _write(self) -> None:
        values, self._values = self._values, {}
        if self._trackers and values:
            read = {name: float(value) for name, value in values.items()}
            for tracker in self._trackers:
                tracker.log(self.step, read)


def _learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return the learning rates of an optimizer's groups, by the name ``lr``, or with the group's number."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    return {"lr" if len(rates) == 1 else f"lr/{index}": rate for index, rate in enumerate(rates)}
