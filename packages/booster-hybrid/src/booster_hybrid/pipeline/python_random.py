"""What a model draws from generators that are not torch's: those that all of Python or numpy share, and its own."""

from __future__ import annotations

import pickle
import random
import sys
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.trace import is_inside
from booster_hybrid.skipped_layers import host_states

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch import nn


class PythonRandomUse:
    """A context that tells what a model draws from generators that are not torch's.

    Args:
        models: The model, and a copy of it whose hooks may draw from what the model has.

    Attributes:
        were_seen: Whether the generators of Python or numpy that all share were drawn from, in one of the contexts.
        own: Likewise, those that modules have to themselves, by the module's name.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._models = models
        self.were_seen = False
        self.own: set[str] = set()

    def __enter__(self) -> None:
        self._before, self._own_before = host_states(), _own_states(self._models)

    def __exit__(self, *_: object) -> None:
        self.were_seen = self.were_seen or host_states() != self._before
        self.own.update(
            name for name, state in _own_states(self._models).items() if self._own_before.get(name) != state
        )

    def check_own(self, layers: Collection[str]) -> None:
        """Raise if code outside of the layers draws from a generator of its own, which each stage would do by itself.

        Args:
            layers: Names of the layers.

        Raises:
            ConfigError: If so, with the module.
        """
        outside = sorted(name for name in self.own if name not in layers and not is_inside(name, layers))
        if outside:
            what = f"Module '{outside[0]}'" if outside[0] else type(self._models[0]).__name__
            msg = (
                f"{what} draws random numbers from a generator of Python or numpy of its own, outside of the layers. "
                "Each stage of a pipeline would draw others: draw by torch, or by the functions of `random` or "
                "`numpy.random`, or use `pp_size=1`."
            )
            raise ConfigError(msg)


def _own_states(models: Iterable[nn.Module]) -> dict[str, bytes]:
    """Return the states of generators that modules keep as attributes, by the module's name."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.random.Generator, numpy.random.RandomState)
    found: dict[str, bytes] = {}
    for name, module in (each for model in models for each in model.named_modules()):
        for value in vars(module).values():
            if isinstance(value, kinds):
                found[name] = found.get(name, b"") + pickle.dumps(value)
    return found
