"""`accumulate`: a context for each micro-batch, that knows which one a step follows.

The loss is divided by the number of micro-batches that the step really has: fewer at the end of an epoch. An optimizer
that steps too early raises, because scripts for Accelerate step in each micro-batch, where that does nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_runtime.data.loader import DistributedDataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.utils.data import DataLoader

    from booster_core import Booster

_COUNT, _IS_OPEN = "_num_accumulated", "_is_accumulating"
"""Of a boosted model: its micro-batches so far, which decide where no loader counts them; whether one has begun."""
_TOO_EARLY = (
    "`optimizer.step()` before the last micro-batch of `accumulate`. Step where the context says so: "
    "`with accumulate(booster, ...) as is_last:` and `if is_last: optimizer.step()`."
)


@contextlib.contextmanager
def accumulate(
    booster: Booster,
    model: nn.Module | None = None,
    steps: int | None = None,
    dataloader: DataLoader[Any] | None = None,
) -> Iterator[bool]:
    """Return a context for forward and backward of one micro-batch, whose value says whether a step comes next.

    `Booster.backward` divides the loss by the number of micro-batches of the step, where an optimizer of this model is
    passed. ``loss.backward()`` does not: the step raises then, as it does before the last micro-batch.

    Args:
        booster: Of the run.
        model: The boosted model; may be left out when one model is boosted.
        steps: Number of micro-batches of a step.
        dataloader: The boosted loader: its last batches of an epoch are a step of their own, if fewer are left. Where
            it has no known length, the batches of a step are read before its first one is used.

    Raises:
        ConfigError: If ``steps`` is no positive integer, the loader is no boosted one or in no pass, or another
            micro-batch of the model has begun and not ended.

    Collective: as `Booster.no_sync`.
    """
    boosted = booster.boosted_model(model, "accumulate")
    facts = boosted.__dict__
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        msg = (
            f"`accumulate` needs the number of micro-batches of a step; got `steps={steps!r}`. Call "
            "`with accumulate(booster, model, steps=4, dataloader=loader) as is_last:`, and `optimizer.step()` and "
            "`optimizer.zero_grad()` under `if is_last:`."
        )
        raise ConfigError(msg)
    if facts.get(_IS_OPEN, False):
        msg = "`accumulate` is active already. Leave its block before the next one begins."
        raise ConfigError(msg)
    if dataloader is None:
        position, left = facts.get(_COUNT, 0) % steps, steps
    else:
        position, left = _progress(dataloader, steps)
    size = min(steps, position + 1 + left)
    is_last = position + 1 == size
    for optimizer in boosted.boosted_optimizers:
        optimizer.refuses_step = None if is_last else _TOO_EARLY
    facts[_IS_OPEN] = True
    try:
        with (
            booster.weighing_losses(1 / size, boosted),
            contextlib.nullcontext() if is_last else booster.no_sync(boosted),
        ):
            yield is_last
        facts[_COUNT] = facts.get(_COUNT, 0) + 1
    finally:
        facts[_IS_OPEN] = False


def _progress(loader: DataLoader[Any], steps: int) -> tuple[int, int]:
    """Return the place in its step, from 0, of the batch that a loader handed out last, and how many follow.

    Raises:
        ConfigError: If the loader doesn't know.
    """
    if not isinstance(loader, DistributedDataLoader) or loader.number < 1:
        msg = (
            "`accumulate` needs to know how many batches the `dataloader` has left: pass the loader that `boost` "
            "returned, in a loop over it. Without `dataloader`, all epochs' micro-batches are counted on."
        )
        raise ConfigError(msg)
    position = (loader.number - 1) % steps
    return position, loader.count_left(steps - 1 - position)
