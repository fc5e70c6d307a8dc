"""Which tensors a save writes: what each rank tells of those that it owns parts of, and what all ranks own together.

Ranks that own parts of the same tensors tell the same text, which then travels once, or not at all
(`booster_runtime.checkpoint.session`). How much each owns of every tensor is only summed.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import CheckpointError, shorten
from booster_runtime.checkpoint.files.layout import TensorSpec
from booster_runtime.checkpoint.session import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from booster_runtime.checkpoint.save.parts import Part

OwnedSpec = tuple[str, tuple[int, ...], "torch.dtype", int]
"""A tensor's name, shape, dtype in the file, and number of elements that a rank writes."""


def local_specs(part: Part) -> tuple[str, dict[str, int]]:
    """Return the tensors that this rank owns parts of, as text, and the number of elements that it owns of each.

    Raises:
        CheckpointError: If shards of one tensor have different shapes.

    Collective: none.
    """
    specs: dict[str, tuple[tuple[int, ...], str]] = {}
    owned: dict[str, int] = {}
    for shard in part.owned_shards():
        key = shard.key
        shape, _ = specs.setdefault(key, (shard.global_shape, str(part.file_dtype(shard)).removeprefix("torch.")))
        if shape != shard.global_shape:
            msg = f"'{key}' has shards of shape {shape} and of shape {shard.global_shape}."
            raise CheckpointError(msg)
        owned[key] = owned.get(key, 0) + shard.numel
    return json.dumps([[key, shape, dtype] for key, (shape, dtype) in specs.items()], separators=(",", ":")), owned


def merge_specs(
    tables: Sequence[str],
    owned: Mapping[str, int],
    learned: Iterable[OwnedSpec],
    total_over_ranks: Callable[[Sequence[int]], list[int]],
) -> list[TensorSpec]:
    """Return the whole tensors that all ranks' shards make up.

    Args:
        tables: Every rank's text.
        owned: What this rank owns of each of its tensors.
        learned: What all ranks together own besides.
        total_over_ranks: Adds numbers up over all ranks.

    Raises:
        CheckpointError: If a tensor is not owned exactly once, or ranks disagree about its shape or dtype.

    Collective: every rank, if ``total_over_ranks`` is.
    """
    specs: dict[str, TensorSpec] = {}
    for table in distinct(tables):
        for key, shape, dtype in json.loads(table):
            _add(specs, key, tuple(shape), getattr(torch, dtype))
    totals = dict(zip(specs, total_over_ranks([owned.get(key, 0) for key in specs]), strict=True))
    for key, shape, dtype, numel in learned:
        _add(specs, key, shape, dtype)
        totals[key] = totals.get(key, 0) + numel
    wrong = [
        f"{key} ({totals[key]} of {math.prod(spec.shape)} elements)"
        for key, spec in specs.items()
        if totals[key] != math.prod(spec.shape)
    ]
    if wrong:
        msg = (
            f"{len(wrong)} tensors are not owned by exactly one rank in each of their parts: {shorten(wrong)}. Are "
            "all ranks saving the same model, under the plugin that boosted it?"
        )
        raise CheckpointError(msg)
    return list(specs.values())


def _add(specs: dict[str, TensorSpec], key: str, shape: tuple[int, ...], dtype: Any) -> None:
    spec = specs.get(key)
    if spec is None:
        specs[key] = TensorSpec(key=key, shape=shape, dtype=dtype)
    elif (spec.shape, spec.dtype) != (shape, dtype):
        msg = f"Ranks disagree about '{key}': {spec.shape} of {spec.dtype}, and {shape} of {dtype}."
        raise CheckpointError(msg)
