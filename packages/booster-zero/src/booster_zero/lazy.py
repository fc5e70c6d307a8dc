"""Models without values: they are split, cut and laid out; then each rank makes, reads or gets just what it keeps."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from booster_core.state import NamedTensors, TensorShard, full_box
from booster_runtime.sharding import raised_on_all
from booster_zero.engine.states import Keep

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from booster_core.plugin import BoostContext
    from booster_runtime.lazy import Recording
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.layout import Layout


def fill_model(
    model: nn.Module,
    recording: Recording,
    shards: Iterable[TensorShard],
    context: BoostContext,
    layout: Layout | None,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Fill in a boosted model's values: this rank's parts of parameters and masters, and whole buffers.

    One whole parameter exists at a time at most, and none of those whose values are a file's as they are. Of buckets
    that are moved between memories, one is where it can be written to.

    Args:
        model: The user's model; what it has lost to other stages is neither made nor read.
        recording: How its values are made, or where they are.
        shards: What this rank holds; see `ShardedStateAdapter.shards_to_fill`.
        context: Device and ranks.
        layout: The buckets; ``None`` where there are none.
        shapes: The parameters' shapes in the user's model by name, where this rank has split ones.

    Raises:
        LazyInitError: If files that values come from are gone, or have changed.

    Collective: every rank of the world: an error on one is raised on all.
    """
    recording.leave_out_absent()
    bucket_of = {} if layout is None else {slot.index: each for each in layout.buckets for slot in each.plan.slots}
    for index, parameter in enumerate(model.parameters()):
        is_stand_in = any(size > 1 and not step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        if is_stand_in and index not in bucket_of:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=context.device)
    named, recorded = NamedTensors.of(model).name_of, recording.name_of
    path_of, moved = {}, {}
    for index, parameter in enumerate(model.parameters()):
        if id(parameter) in recorded:
            path_of[named[id(parameter)]] = path = recorded[id(parameter)]
            bucket = bucket_of.get(index)
            if bucket is not None and bucket.keep is not Keep.ALWAYS:
                moved[path] = bucket
    shapes = shapes or {named[id(parameter)]: tuple(parameter.shape) for parameter in model.parameters()}
    with raised_on_all("boost", context.device), _Present(moved) as present:
        recording.fill(_at_paths(shards, path_of, shapes), context.device, before_write=present.come)
    published = {}
    for bucket in dict.fromkeys(bucket_of.values()):
        if bucket.keep is not Keep.ALWAYS:
            continue
        if bucket.has_masters:  # which were filled
            published[bucket] = bucket.publish()
        else:
            bucket.take_working_values()
    for pending in published.values():
        pending.wait()


class _Present(contextlib.ExitStack):
    """Keeps one bucket in use to be written to: the one that came last.

    Args:
        bucket_of: Buckets by the paths of their parameters.
    """

    def __init__(self, bucket_of: Mapping[str, Bucket]) -> None:
        super().__init__()
        self._bucket_of = bucket_of
        self._bucket: Bucket | None = None

    def come(self, shard: TensorShard) -> None:
        """Have the bucket of a shard in use, if it is one that moves, and no other."""
        bucket = self._bucket_of.get(shard.name)
        if bucket is not None and bucket is not self._bucket:
            self.close()
            self.callback(bucket.round_values)
            self.enter_context(bucket.in_use(changes=True))
            self._bucket = bucket


def _at_paths(
    shards: Iterable[TensorShard], path_of: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[TensorShard]:
    """Yield the shards of parameters without values by their paths in the recording.

    Of a parameter of which this rank has nothing, an empty one is yielded: what is not listed would be made whole.
    """
    elsewhere = {*path_of}
    for shard in shards:
        if shard.name in path_of:
            elsewhere.discard(shard.name)
            yield replace(shard, name=path_of[shard.name])
    for name in sorted(elsewhere):
        shape, data = shapes[name], torch.empty(0)
        yield TensorShard(
            name=path_of[name], global_shape=shape, dtype=data.dtype, box=full_box(shape), flat=(0, 0), data=data
        )
