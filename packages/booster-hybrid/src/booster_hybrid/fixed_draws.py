"""Runs in which models draw what they are told, and the generators of Python and numpy as they were before a run."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

_HIGH = 1.0 - 2.0**-24


class ConstantRandomMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch draw a given value wherever it draws a single number between 0 and 1.

    Models skip layers (`layerdrop`) where such a number is below a probability, or above one.

    Args:
        value: The number.
    """

    supports_higher_order_operators = True

    def __init__(self, value: float = _HIGH) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what an operation does, or return the number."""
        del types
        drawn = self.drawn(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if drawn is None else drawn

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the number if an operation draws a single one, else ``None``."""
        if func is torch.ops.aten.rand.default and all(size == 1 for size in args[0]):
            # A constant, so that a fake tensor of it can be asked for its value.
            return torch.tensor(self.value, dtype=kwargs.get("dtype"), device=kwargs.get("device")).reshape(args[0])
        if func is torch.ops.aten.uniform_.default and args[0].numel() == 1:
            return args[0].fill_(self.value)  # type: ignore[no-any-return]
        return None


def host_states() -> tuple[Any, ...]:
    """Return the states of the generators of Python and, where it is loaded, of numpy, to be compared."""
    numpy = sys.modules.get("numpy")
    arrays = () if numpy is None else numpy.random.get_state()
    return random.getstate(), *(each.tobytes() if hasattr(each, "tobytes") else each for each in arrays)


@contextlib.contextmanager
def preserve_generators() -> Iterator[None]:
    """Put the generators of Python and numpy back to where they were."""
    numpy = sys.modules.get("numpy")
    host, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(host)
        if numpy is not None:
            numpy.random.set_state(arrays)
