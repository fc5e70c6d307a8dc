"""Lazy models: they are split, cut and laid out without values; then each rank makes or reads just what it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from booster_core.state import NamedTensors
from booster_hybrid.tensor_parallel.split import is_repeated
from booster_runtime.state import MASTER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from booster_core.plugin import BoostContext
    from booster_core.state import StateAdapter, TensorShard
    from booster_runtime.lazy import Recording


def fill_model(
    model: nn.Module, recording: Recording, adapter: StateAdapter, context: BoostContext, *, has_optimizer: bool
) -> None:
    """Fill in a boosted model's values: this rank's parts of parameters and masters, and whole buffers.

    One whole parameter exists at a time, and none of those whose values are a file's as they are.

    Args:
        model: The user's model; what it has lost to other stages is neither made nor read.
        recording: How its values are made.
        adapter: Tells which part of each parameter this rank holds.
        context: Device and ranks.
        has_optimizer: Whether there are masters, which get their values from the same tensors.

    Raises:
        LazyInitError: If files that values come from are gone, or have changed.

    Collective: every rank of the world: an error on one is raised on all.
    """
    recording.leave_out_absent()
    for parameter in model.parameters():
        if is_repeated(parameter.data):  # no optimizer holds it, so that no bucket does
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=context.device)
    error: Exception | None = None
    try:
        recording.fill(_shards(model, recording, adapter, has_optimizer=has_optimizer), context.device)
    except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
        error = caught
    context.coordinator.raise_together(error, name="boost")
    adapter.finish_load(model=True, optimizer=False)


def _shards(
    model: nn.Module, recording: Recording, adapter: StateAdapter, *, has_optimizer: bool
) -> Iterator[TensorShard]:
    """Yield the shards of parameters without values, and of their masters, by the names of the recording."""
    recorded, named = recording.name_of, NamedTensors.of(model).name_of
    ids = {named[id(parameter)]: id(parameter) for parameter in model.parameters()}
    paths = {name: recorded[key] for name, key in ids.items() if key in recorded}
    for shard in adapter.model_shards():
        if shard.name in paths:
            yield replace(shard, name=paths[shard.name])
    for shard in adapter.optimizer_shards() if has_optimizer else ():
        if shard.name in paths and shard.state == MASTER:
            yield replace(shard, name=paths[shard.name])
