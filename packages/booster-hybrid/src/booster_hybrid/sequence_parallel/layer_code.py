"""Whether the code that runs inside of a layer is the layer's own, or what stands there for whole sequences."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class _Here(threading.local):
    """Of a thread: ranks within a process have one each.

    Attributes:
        num_apart: How many functions run which are not the layer's.
        is_whole: Whether what runs gets whole sequences.
    """

    num_apart = 0
    is_whole = False


_here = _Here()


def not_of_the_layer(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that layers call know of lengths what layers must not ask.

    Args:
        function: The function.
    """

    @functools.wraps(function)
    def apart(*args: P.args, **kwargs: P.kwargs) -> T:
        _here.num_apart += 1
        try:
            return function(*args, **kwargs)
        finally:
            _here.num_apart -= 1

    return apart


def give_whole_sequences(*, to_what_follows: bool) -> None:
    """Note whether what runs next inside of a layer gets whole sequences, whose lengths it may ask.

    Args:
        to_what_follows: Whether it does.
    """
    _here.is_whole = to_what_follows


def is_of_the_layer() -> bool:
    """Return whether the layer's own code runs, on this rank's positions."""
    return not (_here.num_apart or _here.is_whole)
