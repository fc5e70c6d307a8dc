"""Whether the code that runs inside of a layer is the layer's own, or what stands there for whole sequences."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")
_running: list[None] = []
_whole: list[None] = []


def not_of_the_layer(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that layers call know of lengths what layers must not ask.

    Args:
        function: The function.
    """

    @functools.wraps(function)
    def apart(*args: P.args, **kwargs: P.kwargs) -> T:
        _running.append(None)
        try:
            return function(*args, **kwargs)
        finally:
            _running.pop()

    return apart


def give_whole_sequences(*, to_what_follows: bool) -> None:
    """Note whether what runs next inside of a layer gets whole sequences, whose lengths it may ask.

    Args:
        to_what_follows: Whether it does.
    """
    _whole[:] = [None] if to_what_follows else []


def is_of_the_layer() -> bool:
    """Return whether the layer's own code runs, on this rank's positions."""
    return not (_running or _whole)
