"""Batches on which a model is probed: with so many positions that these can be told from all other sizes.

A second batch has the length of the user's own, as layers may compute something else from longer sequences.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_runtime.data import taken_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from booster_hybrid.probe.calls import Call

MOST_POSITIONS = 128
"""Most positions of the first sequences in a probe, but where a model takes none so short."""
_ENOUGH = 32
"""Positions of a shorter sequence that is repeated."""
_MOST_ELEMENTS = 1 << 26
"""Of the largest activations of longer ones: 512 MiB in fp64, on each rank."""


def _positions_of(given: Any) -> tuple[Tensor, int] | None:
    """Return the tokens of a batch, or its hidden states, and their dimension that runs over positions."""
    rows = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor) and each.dim() > 1]
    tokens = ((each, each.dim() - 1) for each in rows if not each.is_floating_point())
    return next(tokens, None) or next(((each, 1) for each in rows if each.dim() == 3), None)


def calls_of_model(model: nn.Module, batch: Any, size: int) -> Iterator[Call]:
    """Yield calls of a model with the sequences of a batch cut or repeated to a clear number, then as they are.

    Masks hide nothing in it: what positions compute that see no other one is nobody's business, and may differ. Where
    there are as many images as a batch has tokens for them, sequences can only go on by more of their last tokens.

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
        least = -(-length // size)
        clear = clear_number(model, samples, 2 * least, least)
        if clear is not None and not is_clear(model, samples, length):
            yield as_call(pytree.tree_map_only(torch.Tensor, functools.partial(_longer, length, clear * size), given))
    yield as_call(given)


def call_of_other_length(model: nn.Module, batch: Any, size: int, compared: Call) -> Call | None:
    """Return a call with as many positions as a batch has, as far as memory allows, or with fewer than were compared.

    Args:
        model: The model.
        batch: What it takes.
        size: Number of ranks over which sequences are split.
        compared: A call that was compared already.

    Returns:
        ``None`` for batches without sequences.
    """
    given = taken_by(model, batch)
    found, before = _positions_of(given), _positions_of(compared)
    if found is None or before is None:
        return None
    rows, along = found
    length, widest = rows.shape[along], max((max(each.shape, default=1) for each in model.parameters()), default=1)
    wanted = min(length, max(MOST_POSITIONS, _MOST_ELEMENTS // (max(rows.shape[0], 2) * widest)))
    if wanted < size or wanted == before[0].shape[before[1]]:
        wanted = max(size, wanted // 2)
    return as_call(pytree.tree_map_only(torch.Tensor, functools.partial(_with, length, wanted), given))


def is_clear(module: nn.Module, samples: int, positions: int) -> bool:
    """Return whether a number of positions can be told from all other sizes: none is a multiple of it.

    Args:
        module: Has parameters of the other sizes.
        samples: Another size.
        positions: The number.
    """
    sizes = {samples} | {size for each in module.parameters() for size in each.shape if size}
    return positions > 1 and all(size % positions for size in sizes)


def clear_number(module: nn.Module, samples: int, longest: int, least: int = 3) -> int | None:
    """Return the largest number of positions, up to a limit, of which no other size is a multiple; ``None`` for none.

    Args:
        module: Has parameters of the other sizes.
        samples: Another size.
        longest: The limit.
        least: The least number.
    """
    primes = (each for each in range(longest, max(least, 3) - 1, -1) if all(each % factor for factor in range(2, each)))
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


def _longer(length: int, wanted: int, value: Tensor) -> Tensor:
    """Return an argument for more positions, which repeat its last one."""
    if value.dim() < 2 or value.shape[-1] != length or value.is_floating_point():
        return value
    return torch.cat([value, value[..., -1:].expand(*value.shape[:-1], wanted - length)], -1)


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
