"""Batches on which a model is probed: with so many positions that these can be told from all other sizes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_hybrid.probe.lengths import MOST_POSITIONS, is_clear
from booster_runtime.data import taken_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from booster_hybrid.probe.calls import Call

_ENOUGH = 32
"""Positions of a shorter sequence that is repeated."""


def _positions_of(given: Any) -> tuple[Tensor, int] | None:
    """Return the tokens of a batch, or its hidden states, and their dimension that runs over positions."""
    rows = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor) and each.dim() > 1]
    tokens = ((each, each.dim() - 1) for each in rows if not each.is_floating_point())
    return next(tokens, None) or next(((each, 1) for each in rows if each.dim() == 3), None)


def sizes_of(model: nn.Module, batch: Any) -> tuple[int, int]:
    """Return the numbers of samples and positions of a batch of tokens or hidden states; 0 for others.

    Args:
        model: The model.
        batch: What it takes.
    """
    found = _positions_of(taken_by(model, batch))
    return (0, 0) if found is None else (found[0].shape[0], found[0].shape[found[1]])


def calls_of_model(model: nn.Module, batch: Any, size: int) -> Iterator[Call]:
    """Yield calls of a model with the sequences of a batch cut or repeated to a clear number, then as they are.

    Masks hide nothing in it: what positions compute that see no other one is nobody's business, and may differ.

    Args:
        model: The model.
        batch: What it takes.
        size: Number of ranks over which sequences are split, each of which gets equally many positions.
    """
    given = taken_by(model, batch)
    found = _positions_of(given)
    if found is not None:
        rows, along = found
        samples, length = max(rows.shape[0], 2), rows.shape[along]
        for longest in (min(max(length, _ENOUGH), MOST_POSITIONS), min(length, MOST_POSITIONS)):
            clear = clear_number(model, samples, longest // size)
            if clear is not None:
                yield as_call(pytree.tree_map_only(torch.Tensor, functools.partial(_with, length, clear * size), given))
    yield as_call(given)


def clear_number(module: nn.Module, samples: int, longest: int) -> int | None:
    """Return the largest number of positions, up to a limit, of which no other size is a multiple; ``None`` for none.

    Args:
        module: Has parameters of the other sizes.
        samples: Another size.
        longest: The limit.
    """
    primes = (each for each in range(longest, 2, -1) if all(each % factor for factor in range(2, each)))
    return next((each for each in primes if is_clear(module, samples, each)), None)


def _with(length: int, wanted: int, value: Tensor) -> Tensor:
    """Return an argument for another number of positions: some of these, or these again and again."""
    if value.dim() < 2:
        return value
    if value.shape[0] == 1:
        value = torch.cat([value, value])  # or what there is for each token can't be told from what is for a position
    dims = [dim for dim, size in enumerate(value.shape) if dim > 0 and size == length]
    if value.is_floating_point() and value.dim() == 3:
        dims = dims[:1]  # hidden states may be as wide
    for dim in dims:
        value = torch.cat([value] * -(-wanted // length), dim).narrow(dim, 0, wanted)
    is_mask = not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())
    return torch.ones_like(value) if is_mask else value


def as_call(given: Any) -> Call:
    """Return the arguments of a call.

    Args:
        given: What a model takes of a batch.
    """
    if hasattr(given, "keys"):
        return (), {**given}
    return (tuple(given), {}) if isinstance(given, (list, tuple)) else ((given,), {})


def with_choices(batch: Any) -> list[Any]:
    """Return a batch, and another one that has several choices for each sample.

    Args:
        batch: What a model's forward takes, whose token indices are of shape ``(samples, positions)``.
    """
    return [batch, pytree.tree_map_only(torch.Tensor, lambda each: torch.stack([each, each], 1), batch)]
