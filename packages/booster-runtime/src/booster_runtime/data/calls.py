"""How a model is called with a batch as a data loader yields it, where Booster calls it and not the script."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch.

    Args:
        function: The model, or its forward.
        batch: A mapping becomes keyword arguments, a list or tuple positional ones; anything else is the one argument.

    Collective: as the function.
    """
    if isinstance(batch, Mapping):
        return function(**batch)
    if isinstance(batch, (list, tuple)):
        return function(*batch)
    return function(batch)


def taken_by(model: nn.Module, batch: Any) -> Any:
    """Return a batch without the entries that a model's forward does not take: those are for the criterion alone.

    Args:
        model: The user's model.
        batch: A batch; only mappings have entries that may be left out.

    Collective: none.
    """
    if not isinstance(batch, Mapping):
        return batch
    parameters = inspect.signature(model.forward).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return batch
    return {name: value for name, value in batch.items() if name in parameters}
