"""`TrainingFunctions`: what a training consists of, for whatever rehearses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class TrainingFunctions:
    """The functions that `verify`, `plan`, `choose_plugin` and `find_batch_size` train with, also by commands.

    Args:
        build: Returns ``(model, optimizer)``, new ones at each call and with the same weights under the same seed.
        batch: Returns the whole batch, the same at each call, which data parallel ranks share evenly: a mapping becomes
            keyword arguments of the model, a list or tuple positional ones. `find_batch_size` calls it with the number
            of samples instead.
        loss: Called as ``loss(outputs, batch)``, which is how a pipeline calls it, too; returns a mean over samples.
            ``None`` takes the loss that the model's outputs have.
    """

    build: Callable[[], tuple[Any, ...]]
    batch: Callable[..., Any]
    loss: Callable[[Any, Any], Tensor] | None = None
