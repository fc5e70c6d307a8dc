"""ZeRO's state as shards: parameters whole on every rank; optimizer state and masters in flat ranges, or by owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import CheckpointError
from booster_core.state import (
    MASTER,
    JSONValue,
    ListedGroup,
    ParamGroup,
    Replica,
    ReplicatedStateAdapter,
    StateAdapter,
    TensorMeta,
    TensorShard,
    flatten_state,
    unsaved_state,
)
from booster_runtime.sharding import piece_meta, piece_shard, whole_shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from booster_core.ranks import DistCoordinator
    from booster_runtime.sharding import State
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.engine import ShardedEngine
    from booster_zero.engine.shard import BucketPiece


class ZeroStateAdapter(StateAdapter):
    """Shows a model that every rank has whole, and whose optimizer state is split over ranks.

    Args:
        model: The boosted model.
        sharded: Its trained parameters, and the optimizers; ``None`` where there are none.
        coordinator: Tells rank and number of ranks.
        held_by: For parameters of which other ranks hold other parts, by name: this rank's place among those that hold
            the same part.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: ShardedEngine | None,
        coordinator: DistCoordinator | Replica,
        held_by: Mapping[str, Replica] | None = None,
    ) -> None:
        self.replicated = ReplicatedStateAdapter(model, None, coordinator, held_by=held_by)
        self.sharded = sharded
        self.taken_as_parameters: set[int] = set()

    @property
    def keeps_values(self) -> bool:
        """Whether no home moves values between memories."""
        return self.sharded is None or not self.sharded.home.moves

    # ---- the model

    def model_shards(self) -> Iterator[TensorShard]:
        if self.sharded is not None:
            self.sharded.gathers.wait()
        return self.replicated.model_shards()

    def export_shards(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[TensorShard]:
        """Yield masters in place of parameters that a file holds in another format, and all else as it is."""
        buckets = self.buckets_to_export(dtypes)
        names = self.required_engine().names if buckets else {}
        with_masters = {names[slot.index] for bucket in buckets for slot in bucket.plan.slots if slot.numel}
        yield from (shard for shard in self.model_shards() if shard.name not in with_masters)
        for bucket in buckets:
            with bucket.in_use(changes=True):
                bucket.take_working_values()  # of parameters that the script has written since the last step
                bucket.note_versions()
                yield from (self.shard_of(piece, None, piece.values) for piece in bucket.pieces)

    def buckets_to_export(self, dtypes: Mapping[str, torch.dtype]) -> list[Bucket]:
        """Return the buckets with masters of which a file of these formats shows more than the working values do."""
        if self.sharded is None:
            return []
        names = self.sharded.names
        return [
            bucket
            for bucket in self.buckets_with_masters()
            if any(
                dtypes.get(names[slot.index], bucket.format.working) != bucket.format.working
                for slot in bucket.plan.slots
            )
        ]

    def model_targets(self, stored: Mapping[str, TensorMeta]) -> Iterator[TensorShard]:
        """Yield `model_shards`, and masters whose values the working format would round on their way from the file.

        `finish_load` leaves such a master alone, since it rounds to the working value. Masters of a file in the
        working format are not yielded: those that an optimizer's file has brought before are truer than the model's.
        """
        yield from self.model_shards()
        for bucket in self.buckets_with_masters() if self.sharded is not None else ():
            rounded = self._rounded_pieces(bucket, stored)
            if rounded:
                with bucket.in_use(changes=True):
                    for piece in rounded:
                        yield self.shard_of(piece, None, piece.values, is_owner=False)

    def _rounded_pieces(self, bucket: Bucket, stored: Mapping[str, TensorMeta]) -> list[BucketPiece]:
        """Return the pieces of a bucket whose values in a file lose digits in the working format."""
        names, working = self.required_engine().names, bucket.format.working
        metas = ((piece, stored.get(names[piece.index])) for piece in bucket.pieces)
        return [piece for piece, meta in metas if meta is not None and meta.dtype != working]

    def tied_names(self) -> Mapping[str, str]:
        return self.replicated.tied_names()

    def extra_state(self) -> Mapping[str, object]:
        return self.replicated.extra_state()

    def load_extra_state(self, values: Mapping[str, object]) -> None:
        self.replicated.load_extra_state(values)

    # ---- the optimizer

    def optimizer_shards(self) -> Iterator[TensorShard]:
        zero = self.required_engine()
        states = {index: state for hosted in zero.hosted for index, state in hosted.states().items()}
        with_masters = set(self.buckets_with_masters())
        members = zero.members()  # of others the model has all there is
        for bucket in zero.layout.buckets:
            with bucket.in_use(changes=True):
                for piece in bucket.pieces:
                    tensors, _ = flatten_state(zero.names[piece.index], states.get(piece.index, {}))
                    for key, tensor in tensors.items():
                        yield self.shard_of(piece, key, tensor)
                    if bucket in with_masters and piece.index in members:
                        yield self.shard_of(piece, MASTER, piece.values)
        for index in sorted(self.taken_as_parameters):
            yield from self.parameter_as_master(index)

    def parameter_as_master(self, index: int) -> Iterator[TensorShard]:
        """Yield what is here of a parameter itself, under the state ``"master"``, to be written to.

        Args:
            index: The parameter's number; this run keeps no masters of it.
        """
        zero = self.required_engine()
        zero.gathers.wait()
        yield whole_shard(zero.names[index], MASTER, zero.layout.parameters[index], is_owner=False)

    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        return {name: scalars for group in self._groups() for name, _, scalars in group.states() if scalars}

    def unsaved_state(self) -> Sequence[str]:
        return [key for hosted in self.required_engine().hosted for key in unsaved_state(hosted.optimizer)]

    def param_groups(self) -> Sequence[ParamGroup]:
        return [group.described() for group in self._groups()]

    def _groups(self) -> list[ListedGroup]:
        """Return the parameter groups of all optimizers."""
        return [group for hosted in self.required_engine().hosted for group in hosted.listed()]

    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        zero = self.required_engine()
        listed = self._groups()
        for group, saved in zip(listed, groups, strict=True):
            group.set_options(saved.options)
        group_of = {name: group for group in listed for name in group.names}
        # One bucket after the other, so that at most a bucket's worth is in memory on its way to files.
        for bucket in zero.layout.buckets:
            made: dict[int, State] = {}
            for piece in bucket.pieces:
                name = zero.names[piece.index]
                if name in group_of:
                    metas = {key: piece_meta(key, meta, piece) for key, meta in tensors.get(name, {}).items()}
                    state = group_of[name].restore(name, metas, scalars.get(name, {}))
                    if state:
                        made[piece.index] = state
            if made:
                bucket.offload_state(made)
        # Without masters of its own, a run takes the true values as its parameters.
        with_masters = set(self.buckets_with_masters())
        self.taken_as_parameters = {
            slot.index
            for bucket in zero.layout.buckets
            for slot in bucket.plan.slots
            if bucket not in with_masters
            and (name := zero.names[slot.index]) in group_of
            and MASTER in tensors.get(name, {})
        }
        if zero.home.is_on_disk:
            zero.raise_together(zero.home.problem("What found no room has it in RAM; nothing has been read yet."))

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        zero = self.sharded
        if zero is None:
            return
        zero.gathers.wait()
        for bucket in zero.layout.buckets:
            is_taken = any(slot.index in self.taken_as_parameters for slot in bucket.plan.slots)
            if model or is_taken:
                bucket.take_working_values()
                bucket.note_versions()
        if optimizer:
            zero.publish(self.buckets_with_masters())
        self.taken_as_parameters = set()

    def buckets_with_masters(self) -> list[Bucket]:
        """Return the buckets whose optimizer updates a copy in another format."""
        buckets = self.required_engine().layout.buckets
        return [bucket for bucket in buckets if bucket.format.working != bucket.format.master]

    def shard_of(self, piece: BucketPiece, state: str | None, tensor: Tensor, *, is_owner: bool = True) -> TensorShard:
        """Return the shard of a piece's values or state."""
        zero = self.required_engine()
        is_owner = is_owner and zero.layout.ranks_of(piece.index).replica_rank == 0
        return piece_shard(zero.names[piece.index], state, piece, tensor, is_owner=is_owner)

    def required_engine(self) -> ShardedEngine:
        """Return the engine, whose optimizers a call is about."""
        if self.sharded is None:
            msg = "There is no optimizer to save or load: none was passed with the model."
            raise CheckpointError(msg)
        return self.sharded
