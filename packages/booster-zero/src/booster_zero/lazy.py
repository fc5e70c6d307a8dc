"""Models without values: they are split, cut and laid out; then each rank makes, reads or gets just what it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from booster_core.state import MASTER, NamedTensors, TensorShard, full_box
from booster_runtime.sharding import raised_on_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from booster_core.plugin import BoostContext
    from booster_core.state import StateAdapter
    from booster_runtime.lazy import Recording
    from booster_zero.engine.engine import ShardedEngine


def fill_model(
    model: nn.Module,
    recording: Recording,
    adapter: StateAdapter,
    context: BoostContext,
    engine: ShardedEngine | None,
    *,
    sharded: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Fill in a boosted model's values: this rank's parts of parameters and masters, and whole buffers.

    One whole parameter exists at a time at most, and none of those whose values are a file's as they are.

    Args:
        model: The user's model; what it has lost to other stages is neither made nor read.
        recording: How its values are made, or where they are.
        adapter: Tells which part of each parameter this rank holds.
        context: Device and ranks.
        engine: The trained parameters, whose masters get their values from the same tensors.
        sharded: Where parameters are in shards, of which a rank may have none: their shapes in the user's model by
            name; ``None`` where they are whole.

    Raises:
        LazyInitError: If files that values come from are gone, or have changed.

    Collective: every rank of the world: an error on one is raised on all.
    """
    recording.leave_out_absent()
    for parameter in model.parameters() if sharded is None else ():
        is_stand_in = any(size > 1 and not step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        if is_stand_in:  # no optimizer holds it, so that no bucket does
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=context.device)
    has_optimizer = engine is not None
    with raised_on_all("boost", context.device):
        recording.fill(_shards(model, recording, adapter, sharded or {}, has_optimizer=has_optimizer), context.device)
    if sharded is not None:
        adapter.finish_load(model=True, optimizer=False)
        return
    for bucket in () if engine is None else engine.layout.buckets:
        if bucket.format.working == bucket.format.master:  # masters were filled
            bucket.take_working_values()
        bucket.note_versions()


def _shards(
    model: nn.Module,
    recording: Recording,
    adapter: StateAdapter,
    sharded: Mapping[str, tuple[int, ...]],
    *,
    has_optimizer: bool,
) -> Iterator[TensorShard]:
    """Yield the shards of parameters without values, and of their masters, by the names of the recording."""
    recorded, named = recording.name_of, NamedTensors.of(model).name_of
    ids = {named[id(parameter)]: id(parameter) for parameter in model.parameters()}
    paths = {name: recorded[key] for name, key in ids.items() if key in recorded}
    elsewhere = paths.keys() & sharded.keys()
    for shard in adapter.model_shards():
        if shard.name in paths:
            elsewhere.discard(shard.name)
            yield replace(shard, name=paths[shard.name])
    for shard in adapter.optimizer_shards() if has_optimizer else ():
        if shard.name in paths and shard.state == MASTER:
            yield replace(shard, name=paths[shard.name])
    for name in sorted(elsewhere):  # what is not listed would be made whole
        shape, data = sharded[name], torch.empty(0)
        yield TensorShard(
            name=paths[name], global_shape=shape, dtype=data.dtype, box=full_box(shape), flat=(0, 0), data=data
        )
