"""Layers that training skips at random: found by a dry run in which the numbers that models draw for it are the lowest.

A stage can't begin or end with a layer that is sometimes not called. Models skip layers (`layerdrop`) where a single
random number is below a probability. So a dry run sees all layers where such numbers are high; one where they are low
shows whether any layer would be skipped.
"""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from booster_hybrid.pipeline.trace import Trace

_HIGH, _LOW = 1.0 - 2.0**-24, 0.0
_NUM_SEEDS = 20
"""Runs with other states of the generators of Python and numpy, which can't be told what to draw."""
_SHOWN = 3


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch draw a given value wherever it draws a single number between 0 and 1.

    Args:
        value: The number.

    Attributes:
        count: How many were drawn.
    """

    supports_higher_order_operators = True

    def __init__(self, value: float = _HIGH) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value, self.count = value, 0

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
            self.count += 1
            # A constant, so that a fake tensor of it can be asked for its value.
            return torch.tensor(self.value, dtype=kwargs.get("dtype"), device=kwargs.get("device")).reshape(args[0])
        if func is torch.ops.aten.uniform_.default and args[0].numel() == 1:
            self.count += 1
            return args[0].fill_(self.value)  # type: ignore[no-any-return]
        return None


def check_no_layer_is_skipped(model: nn.Module, trace: Trace, called: Callable[[FixedDraws], Trace]) -> None:
    """Raise if training skips some of a model's layers at random.

    Args:
        model: The user's model. Where it is in evaluation mode now, all its modules are put into training mode
            meanwhile.
        trace: What a dry run of it has seen.
        called: Runs the model dry with given draws, and returns what it sees. The states of the generators of Python
            and numpy are not kept; see `kept_generators`.

    Raises:
        ConfigError: If it does.
    """
    if trace.is_certain:
        return
    with _training(model):
        before = host_states()
        _compare(model, trace, called)
        if host_states() == before:
            return
        for seed in range(_NUM_SEEDS):
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
            _compare(model, trace, called)


def _compare(model: nn.Module, trace: Trace, called: Callable[[FixedDraws], Trace]) -> None:
    try:
        seen = {layer.name for layer in called(FixedDraws(_LOW)).layers}
    except Exception:  # noqa: BLE001 - not every model runs without its layers; a run still tells of one that is skipped
        return
    skipped = [layer.name for layer in trace.layers if layer.name not in seen]
    if skipped:
        shown = ", ".join(f"'{name}'" for name in skipped[:_SHOWN]) + (", ..." if len(skipped) > _SHOWN else "")
        msg = (
            f"{type(model).__name__} skips layers at random in training ({shown}), and no activations can pass from "
            "stage to stage where a stage's first layer is not called. Switch it off, for models of transformers by "
            "setting each `layerdrop` of its configuration to 0, or use `pp_size=1`."
        )
        raise ConfigError(msg)


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
def kept_generators() -> Iterator[None]:
    """Put the generators of Python and numpy back to where they were."""
    numpy = sys.modules.get("numpy")
    host, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(host)
        if numpy is not None:
            numpy.random.set_state(arrays)
