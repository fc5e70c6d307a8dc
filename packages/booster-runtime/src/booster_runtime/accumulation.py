"""`accumulate`: a context for each micro-batch, that knows which one a step follows.

The loss is divided by the number of micro-batches that the step really has: fewer at the end of an epoch. An optimizer
that steps too early raises, because scripts for Accelerate step in each micro-batch, where that does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError, GradientError
from booster_runtime.data.loader import DistributedDataLoader

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from booster_core import Booster

_COUNT = "_num_accumulated"
"""The boosted model's number of micro-batches so far, which decides where no loader counts them."""


def accumulate(
    booster: Booster,
    model: nn.Module,
    optimizer: Optimizer | None,
    steps: int | None,
    dataloader: DataLoader[Any] | None,
) -> MicroBatch:
    """Return the context of the next micro-batch; see `Booster.accumulate`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        msg = (
            f"`Booster.accumulate` needs the number of micro-batches of a step; got `steps={steps!r}`. Call "
            "`with booster.accumulate(model, steps=4, dataloader=loader) as is_last:`, and `optimizer.step()` and "
            "`optimizer.zero_grad()` under `if is_last:`."
        )
        raise ConfigError(msg)
    if dataloader is None:
        position, left = vars(model).get(_COUNT, 0) % steps, steps
    else:
        number, remaining = _progress(dataloader)
        position, left = (number - 1) % steps, remaining
    return MicroBatch(booster, model, optimizer, position=position, size=min(steps, position + 1 + left))


class MicroBatch(contextlib.AbstractContextManager[bool]):
    """Forward and backward of one micro-batch.

    Args:
        booster: Which boosted the model.
        model: The boosted model.
        optimizer: The boosted optimizer.
        position: Index of the micro-batch in its step.
        size: Number of micro-batches of the step.
    """

    def __init__(
        self, booster: Booster, model: nn.Module, optimizer: Optimizer | None, *, position: int, size: int
    ) -> None:
        self._booster, self._model, self._optimizer = booster, model, optimizer
        self.size = size
        self._is_last = position + 1 == size
        self._joined: Any = None
        self._leaving = contextlib.ExitStack()

    def __enter__(self) -> bool:
        """Begin; return whether a step follows.

        Raises:
            ConfigError: If another micro-batch has begun and not ended.
        """
        booster: Any = self._booster
        self._joined = booster._joined()  # noqa: SLF001 - batches of `join` weigh losses too
        if isinstance(self._joined, MicroBatch):
            msg = "`Booster.accumulate` is active already. Leave its block before the next one begins."
            raise ConfigError(msg)
        before, booster._joined_batches = booster._joined_batches, weakref.ref(self)  # noqa: SLF001
        self._leaving.callback(setattr, booster, "_joined_batches", before)
        if self._optimizer is not None:
            _let_step(self._optimizer)
        if not self._is_last:
            if self._optimizer is not None:
                _refuse_to_step(self._optimizer)
            self._leaving.enter_context(booster.no_sync(self._model, self._optimizer))
        return self._is_last

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; further backward passes are not divided."""
        self._model.__dict__[_COUNT] = vars(self._model).get(_COUNT, 0) + (error is None)
        self._leaving.__exit__(kind, error, trace)

    def weigh(self, loss: Tensor) -> Tensor:
        """Return this micro-batch's share of the step's loss."""
        return (loss if self._joined is None else self._joined.weigh(loss)) / self.size

    def weighing(self, criterion: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """Return a criterion that gives this micro-batch's share, for pipelines."""
        inner = criterion if self._joined is None else self._joined.weighing(criterion)
        return lambda outputs, batch: inner(outputs, batch) / self.size


def _progress(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return the number of the batch that a loader handed out last, from 1, and how many follow.

    Raises:
        ConfigError: If the loader doesn't know.
    """
    number, left = loader.progress if isinstance(loader, DistributedDataLoader) else (0, None)
    if number < 1 or left is None:
        msg = (
            "`Booster.accumulate` needs to know how many batches the `dataloader` has left: pass the loader that "
            "`boost` returned, in a loop over it, with a data set of known length. Without `dataloader`, all epochs' "
            "micro-batches are counted on."
        )
        raise ConfigError(msg)
    return number, left


def _refuse_to_step(optimizer: Optimizer) -> None:
    """Let an optimizer raise where it steps before the last micro-batch."""
    step = optimizer.step

    @functools.wraps(step)
    def refuse(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        msg = (
            "`optimizer.step()` before the last micro-batch of `Booster.accumulate`. Step where the context says so: "
            "`with booster.accumulate(...) as is_last:` and `if is_last: optimizer.step()`."
        )
        raise GradientError(msg)

    refuse._allowed = vars(optimizer).get("step")  # type: ignore[attr-defined] # noqa: SLF001
    optimizer.step = refuse  # type: ignore[method-assign, assignment]


def _let_step(optimizer: Optimizer) -> None:
    """Take back what `_refuse_to_step` did."""
    present: Any = vars(optimizer).get("step")
    if not hasattr(present, "_allowed"):
        return
    if present._allowed is None:  # noqa: SLF001
        del optimizer.step
    else:
        optimizer.step = present._allowed  # type: ignore[method-assign] # noqa: SLF001
