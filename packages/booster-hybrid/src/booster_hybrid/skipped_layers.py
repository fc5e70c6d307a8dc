"""Layers that training skips at random: found by a run in which the numbers that models draw for it are the lowest.

Between layers that are not called sequences can't be split. Models skip layers (`layerdrop`) where a single random
number is below a probability, or above one. So two runs, one where such numbers are high and one where they are low,
show whether any layer would be skipped. A pipeline's stage tells itself when the layer it begins or ends with is not
called.
"""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import nn

_HIGH, _LOW = 1.0 - 2.0**-24, 0.0
_NUM_SEEDS = 20
"""Runs with other states of the generators of Python and numpy, which can't be told what to draw."""
_SHOWN = 3
REMEDY = "Switch it off, for models of transformers by setting each `layerdrop` of its configuration to 0"
"""What to do about it."""


class ConstantRandomMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch draw a given value wherever it draws a single number between 0 and 1.

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


def skipped_at_random(
    model: nn.Module, names: Sequence[str], called: Callable[[ConstantRandomMode], Collection[str]]
) -> str:
    """Return which layers training skips at random, for messages; nothing where it skips none.

    Args:
        model: The model, all of whose modules are in training mode meanwhile.
        names: Names of its layers.
        called: Runs the model with given draws, and returns which layers were called. It may raise: not every model
            runs without its layers.
    """
    with _training(model):
        before = host_states()
        skipped = _missing(names, called)
        if not skipped and host_states() != before:
            for seed in range(_NUM_SEEDS):
                random.seed(seed)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(seed)
                skipped = skipped or _missing(names, called)
    return ", ".join(f"'{name}'" for name in skipped[:_SHOWN]) + (", ..." if len(skipped) > _SHOWN else "")


def _missing(names: Sequence[str], called: Callable[[ConstantRandomMode], Collection[str]]) -> list[str]:
    """Return the layers that are called by high or by low numbers only."""
    try:
        seen = called(ConstantRandomMode(_LOW))
    except Exception:  # noqa: BLE001 - a run without layers still tells of one that is skipped
        return []
    return [name for name in names if name not in seen] + sorted(set(seen).difference(names))


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put a model that is in evaluation mode into training mode meanwhile."""
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


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
