"""Random batches: each field is a recipe for one argument of a model's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from model_zoo.registry import Batch

Field: TypeAlias = Callable[[torch.Generator, int], Tensor]
"""Draws a tensor for a number of samples."""


def batch_of(**recipes: Field) -> Callable[[torch.Generator, int], Batch]:
    """Return a function that draws a batch with one tensor for each recipe, in their order."""

    def draw(generator: torch.Generator, samples: int) -> Batch:
        return {name: recipe(generator, samples) for name, recipe in recipes.items()}

    return draw


def numbers(high: int, *shape: int, low: int = 0) -> Field:
    """Return a recipe for whole numbers from ``low`` to ``high - 1``, shape ``(samples, *shape)``."""
    return lambda generator, samples: torch.randint(low, high, (samples, *shape), generator=generator)


def normal(*shape: int) -> Field:
    """Return a recipe for normally distributed values, shape ``(samples, *shape)``."""
    return lambda generator, samples: torch.randn(samples, *shape, generator=generator)


def same(values: object) -> Field:
    """Return a recipe for values that are the same in each sample."""
    return lambda _generator, samples: torch.stack([torch.as_tensor(values)] * samples)
