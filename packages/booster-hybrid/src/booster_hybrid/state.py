"""What a rank holds of a model, and its state as shards of the user's own tensors.

The adapter inside shows this rank's part as if it were the whole model; each of its shards is moved to its place in
the tensors of the user's model. A fused projection has several boxes there. For experts that are split over tensor
parallel ranks, too, one adapter is inside of another: what tensor parallelism splits is this rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.state import NamedTensors, StateAdapter, TensorShard, box_shape, refuse_parts, regions_of
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from booster_core.state import Box, JSONValue, ParamGroup, ShardFollower, TensorMeta
    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.pipeline.stages import StageMap
    from booster_hybrid.tensor_parallel.split import Split
    from booster_zero import ShardedStateAdapter
    from booster_zero.engine import Layout


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """What a rank holds of a model.

    Args:
        tensor_group: The tensor parallel ranks.
        splits: The parameters that are split over them, by name.
        expert_group: The expert parallel ranks.
        expert_splits: The parameters of experts that are spread over those, by name. What is here of them may be split
            over the tensor parallel ranks.
        stage: This rank's position in the pipeline.
        pipeline: The ranks of the pipeline; ``None`` where there is none.
        is_owner: Tells by a tensor's name whether this stage is the first to hold it.
        copy_groups: For each set of positions in the pipeline that hold copies: their ranks.
    """

    tensor_group: RankGroup
    expert_group: RankGroup
    splits: Mapping[str, Split] = field(default_factory=dict)
    expert_splits: Mapping[str, Split] = field(default_factory=dict)
    stage: int = 0
    pipeline: ProcessGroup | None = None
    is_owner: Callable[[str], bool] = lambda _: True
    copy_groups: Mapping[tuple[int, ...], ProcessGroup] = field(default_factory=dict)

    def put_together(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor that is split as a parameter is, in the whole model's shape.

        Collective: the tensor parallel ranks; for experts that are spread, the expert parallel ones as well.
        """
        for splits, ranks in ((self.splits, self.tensor_group), (self.expert_splits, self.expert_group)):
            split = splits.get(name)
            if split is not None:
                local = split.spread(local, owned_only=True)
                collectives.all_reduce(local, group=ranks.group).wait()
        return local

    def whole_shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the shapes that parameters of this rank have in the whole model, by name.

        Args:
            model: The user's model, split.
        """
        name_of = NamedTensors.of(model).name_of
        shapes = {}
        for parameter in model.parameters():
            name = name_of[id(parameter)]
            split = self.expert_splits.get(name) or self.splits.get(name)
            shapes[name] = tuple(parameter.shape) if split is None else split.global_shape
        return shapes

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole model's shape, for a parameter that is here."""
        for splits in (self.expert_splits, self.splits):
            split = splits.get(name)
            if split is not None:
                whole = split.take(whole)
        return whole

    def from_stage(self, value: Tensor | None, stage: int) -> Tensor | None:
        """Return on every rank of the pipeline what one of them has.

        Args:
            value: The tensor, on that rank.
            stage: Its position.

        Collective: the ranks of the pipeline.
        """
        if self.pipeline is None:
            return value
        meta = [None if value is None else (value.shape, value.dtype, value.device)]
        dist.broadcast_object_list(meta, group=self.pipeline, group_src=stage)
        if meta[0] is None:
            return None
        shape, dtype, device = meta[0]
        here = value.contiguous() if value is not None else torch.empty(shape, dtype=dtype, device=device.type)
        dist.broadcast(here, group=self.pipeline, group_src=stage)
        return here


class HybridStateAdapter(StateAdapter):
    """Shows split tensors at their places in the whole ones.

    Args:
        inner: Shows the local model among the ranks that hold the same part of it.
        splits: The split parameters, by name.
        is_first: Whether this is the first of the ranks over which they are split, which owns what these all have.
        stages: Which rank of a pipeline holds which tensors; ``None`` where there is none.
        stage: This rank's position in it.
        owns_whole: Whether this rank owns what is not split, if the adapter inside says so; ``is_first`` by default.
    """

    def __init__(
        self,
        inner: ShardedStateAdapter | HybridStateAdapter,
        splits: Mapping[str, Split],
        *,
        is_first: bool,
        stages: StageMap | None = None,
        stage: int = 0,
        owns_whole: bool | None = None,
    ) -> None:
        self._inner, self._splits, self._is_first = inner, splits, is_first
        self._stages, self._stage = stages, stage
        self._owns_whole = is_first if owns_whole is None else owns_whole

    @property
    def layout(self) -> Layout | None:
        """The buckets of the adapter inside."""
        return self._inner.layout

    def shards_to_fill(self) -> Iterator[TensorShard]:
        """Yield what a lazy model's values are written to; see `ShardedStateAdapter.shards_to_fill`."""
        return self._moved(self._inner.shards_to_fill())

    @property
    def keeps_values(self) -> bool:
        """Whether the adapter inside does."""
        return self._inner.keeps_values

    def model_shards(self) -> Iterator[TensorShard]:
        return self._moved(self._inner.model_shards())

    def export_shards(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[TensorShard]:
        return self._moved(self._inner.export_shards(dtypes))

    def model_targets(self, stored: Mapping[str, TensorMeta]) -> Iterator[TensorShard]:
        local = {name: self._local_meta(name, meta) for name, meta in stored.items()}
        return self._moved(self._inner.model_targets(local))

    def follow(self, follower: ShardFollower) -> None:
        self._inner.follow(follower)

    def place(self, shard: TensorShard) -> Iterator[TensorShard]:
        return self._moved(self._inner.place(shard))

    def optimizer_shards(self) -> Iterator[TensorShard]:
        return self._moved(self._inner.optimizer_shards())

    def tied_names(self) -> Mapping[str, str]:
        return self._inner.tied_names() if self._stages is None else self._stages.aliases

    def extra_state(self) -> Mapping[str, object]:
        return self._inner.extra_state()

    def load_extra_state(self, values: Mapping[str, object]) -> None:
        self._inner.load_extra_state(values)

    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        scalars = self._inner.optimizer_scalars()
        for name in sorted(scalars.keys() & self._splits.keys()):
            refuse_parts(f"'{name}' can't be saved or loaded", scalars[name])
        return scalars

    def unsaved_state(self) -> Sequence[str]:
        return self._inner.unsaved_state()

    def param_groups(self) -> Sequence[ParamGroup]:
        return self._inner.param_groups()

    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        for name in sorted(scalars.keys() & self._splits.keys()):
            refuse_parts(f"'{name}' can't be saved or loaded", scalars[name])
        local = {
            name: {state: self._local_meta(name, meta) for state, meta in states.items()}
            for name, states in tensors.items()
        }
        self._inner.prepare_optimizer_load(local, scalars, groups)

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        self._inner.finish_load(model=model, optimizer=optimizer)

    def _local_meta(self, name: str, meta: TensorMeta) -> TensorMeta:
        split = self._splits.get(name)
        if split is None or meta.shape != split.global_shape:
            return meta
        return replace(meta, shape=split.local_shape)

    def _moved(self, shards: Iterator[TensorShard]) -> Iterator[TensorShard]:
        for held in shards:
            # Of the stages that hold a tensor, the first one owns what is owned there.
            is_copy = self._stages is not None and self._stages.owner(held.name) != self._stage
            shard = replace(held, is_owner=held.is_owner and not is_copy)
            split = self._splits.get(shard.name)
            if split is None:
                yield replace(shard, is_owner=shard.is_owner and self._owns_whole)
                continue
            if shard.global_shape != split.local_shape:
                yield replace(shard, is_owner=shard.is_owner and self._is_first)
                continue
            data = shard.data.view(-1) if shard.flat is not None else None
            for region in regions_of(shard.box, shard.flat):
                values = (
                    shard.data
                    if data is None
                    else data[region.start : region.start + region.numel].view(box_shape(region.box))
                )
                yield from self._of_region(shard, split, region.box, values)

    @staticmethod
    def _of_region(shard: TensorShard, split: Split, box: Box, values: Tensor) -> Iterator[TensorShard]:
        """Yield what a box of the local tensor is in the whole one, a part for each range that it touches."""
        low, high = box[split.dim]
        position = 0
        for (start, stop), is_owned in zip(split.ranges, split.owned, strict=True):
            first, last = max(low, position), min(high, position + stop - start)
            if first < last:
                shift = start - position
                moved = (*box[: split.dim], (first + shift, last + shift), *box[split.dim + 1 :])
                yield TensorShard(
                    name=shard.name,
                    state=shard.state,
                    global_shape=split.global_shape,
                    dtype=shard.dtype,
                    box=moved,
                    data=values.narrow(split.dim, first - low, last - first),
                    is_owner=shard.is_owner and is_owned,
                )
            position += stop - start
