"""Replaced ``forward`` methods of single modules, which copies of the modules have as well, until they are restored."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """What a module with a replaced forward has to remember.

    Args:
        own: The forward that the module itself had in place of its class's.
    """

    own: Callable[..., Any] | None

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward that was replaced."""
        return functools.partial(type(module).forward, module) if self.own is None else self.own


def replace_forward(module: nn.Module, mark: str, settings: Replaced, forward: Callable[..., Any]) -> None:
    """Give a module another forward.

    Args:
        module: The module.
        mark: The attribute under which it remembers the settings.
        settings: With the forward that it has.
        forward: A function of the module and its arguments.
    """
    setattr(module, mark, settings)
    # A bound method, unlike a function that remembers the module, is bound to the copy when a module is copied.
    module.forward = types.MethodType(forward, module)


def restore_forwards(model: nn.Module, mark: str) -> None:
    """Take back what `replace_forward` did with a mark, in all modules of a model."""
    for module in model.modules():
        settings: Replaced | None = vars(module).pop(mark, None)
        if settings is not None:
            del module.forward  # the class's own takes its place again
            if settings.own is not None:
                module.forward = settings.own
