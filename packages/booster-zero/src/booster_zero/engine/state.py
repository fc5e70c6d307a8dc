"""Sharded state: parameters whole on every rank, or this rank's pieces; optimizer state and masters in pieces."""

from __future__ import annotations

import weakref
from dataclasses import replace
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
    refuse_parts,
    unsaved_state,
)
from booster_runtime.sharding import piece_meta, piece_shard, whole_shard
from booster_zero.engine.memory import Role
from booster_zero.engine.states import Keep

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from booster_core.ranks import DistCoordinator
    from booster_core.state import ShardFollower
    from booster_runtime.sharding import State
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.engine import ShardedEngine
    from booster_zero.engine.gatherer import Gatherer
    from booster_zero.engine.partition import BucketPiece


class ShardedStateAdapter(StateAdapter):
    """Shows a model whose parameters, optimizer state or both are split over ranks, streamed from where they are.

    Args:
        model: The boosted model.
        sharded: Its trained parameters, and the optimizers; ``None`` where there are none.
        coordinator: Tells rank and number of ranks, of those that hold the same model.
        held_by: For parameters of which other ranks hold other parts, by name: this rank's place among those that hold
            the same part.
        gatherer: Gathers them, where there is no optimizer to ask.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: ShardedEngine | None,
        coordinator: DistCoordinator | Replica,
        held_by: Mapping[str, Replica] | None = None,
        *,
        gatherer: Gatherer | None = None,
    ) -> None:
        self._replicated = ReplicatedStateAdapter(model, None, coordinator, held_by=held_by)
        self.sharded = sharded
        self._gatherer = gatherer if sharded is None else sharded.gatherer
        self.layout = None if self._gatherer is None else self._gatherer.layout
        self._names: Mapping[int, str] = {} if self.layout is None else self.layout.names
        self._taken_as_parameters: set[int] = set()

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return () if self.layout is None else self.layout.buckets

    @property
    def keeps_values(self) -> bool:
        """Whether nothing moves values between memories."""
        return not any(bucket.memory.moves for bucket in self._buckets)

    # ---- the model

    def model_shards(self) -> Iterator[TensorShard]:
        return self._model_shards()

    def _model_shards(self, left_out: Container[Bucket] = ()) -> Iterator[TensorShard]:
        """Yield the model's tensors but for the parameters of some buckets."""
        if self._gatherer is not None:
            self._gatherer.wait()
        for bucket in self._buckets:
            if bucket.keep is Keep.ALWAYS or bucket in left_out:
                continue
            if not bucket.pins:
                bucket.release()  # what is written to the shard must show at the next use
            with bucket.in_use(Role.PARAM, changes=True):
                for piece in bucket.pieces:
                    yield self._shard_of(piece, None, bucket.slice_of(bucket.own, piece))
        yield from self._whole_shards(
            [each for each in self._buckets if each.keep is not Keep.ALWAYS or each in left_out]
        )

    def _whole_shards(self, left_out: Iterable[Bucket]) -> Iterator[TensorShard]:
        """Yield what every rank has whole, but for the parameters of some buckets."""
        names = {self._names[slot.index] for bucket in left_out for slot in bucket.plan.slots}
        yield from self._replicated.model_shards_without(names)

    def export_shards(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[TensorShard]:
        """Yield masters in place of parameters that a file holds in another format, and all else as it is."""
        buckets = self._buckets_to_export(dtypes)
        yield from self._model_shards(buckets)
        for bucket in buckets:
            with bucket.in_use(changes=True):
                bucket.take_working_values()  # of parameters that the script has written since the last step
                yield from (self._shard_of(piece, None, piece.values) for piece in bucket.pieces)

    def shards_to_fill(self) -> Iterator[TensorShard]:
        """Yield what a lazy model's values are written to: masters where there are, and what is here of the rest.

        What a memory moves is to be in use while it is written to; from masters, working values are rounded afterwards.
        """
        in_pieces = [each for each in self._buckets if each.keep is not Keep.ALWAYS or each.has_masters]
        for bucket in in_pieces:
            for piece in bucket.pieces:
                yield replace(self._shard_of(piece, None, piece.values), data=piece.values)
        yield from self._whole_shards(in_pieces)

    def _buckets_to_export(self, dtypes: Mapping[str, torch.dtype]) -> list[Bucket]:
        """Return the buckets with masters of which a file of these formats shows more than the working values do."""
        return [
            bucket
            for bucket in self._buckets_with_masters()
            if any(
                dtypes.get(self._names[slot.index], bucket.format.working) != bucket.format.working
                for slot in bucket.plan.slots
            )
        ]

    def model_targets(self, stored: Mapping[str, TensorMeta]) -> Iterator[TensorShard]:
        """Yield `model_shards`, and masters whose values the working format would round on their way from the file.

        `finish_load` leaves such a master alone, since it rounds to the working value. Masters of a file in the
        working format are not yielded: those that an optimizer's file has brought before are truer than the model's.
        """
        yield from self.model_shards()
        for bucket in self._buckets_with_masters():
            rounded = self._rounded_pieces(bucket, stored)
            if rounded:
                with bucket.in_use(changes=True):
                    for piece in rounded:
                        yield self._shard_of(piece, None, piece.values, is_owner=False)

    def _rounded_pieces(self, bucket: Bucket, stored: Mapping[str, TensorMeta]) -> list[BucketPiece]:
        """Return the pieces of a bucket whose values in a file lose digits in the working format."""
        working = bucket.format.working
        metas = ((piece, stored.get(self._names[piece.index])) for piece in bucket.pieces)
        return [piece for piece, meta in metas if meta is not None and meta.dtype != working]

    def follow(self, follower: ShardFollower) -> None:
        if self.layout is not None:
            self.layout.followers.append(weakref.ref(follower))

    def tied_names(self) -> Mapping[str, str]:
        return self._replicated.tied_names()

    def extra_state(self) -> Mapping[str, object]:
        return self._replicated.extra_state()

    def load_extra_state(self, values: Mapping[str, object]) -> None:
        self._replicated.load_extra_state(values)

    # ---- the optimizer

    def optimizer_shards(self) -> Iterator[TensorShard]:
        zero = self._required_engine()
        states = {index: state for hosted in zero.hosted for index, state in hosted.states().items()}
        members = zero.members()  # of others the model has all there is
        for bucket in zero.layout.buckets:
            with bucket.in_use(changes=True):
                for piece in bucket.pieces:
                    name = self._names[piece.index]
                    tensors, scalars = flatten_state(name, states.get(piece.index, {}))
                    if not piece.is_whole:
                        refuse_parts(f"'{name}' can't be saved", scalars)
                    for key, tensor in tensors.items():
                        yield self._shard_of(piece, key, tensor)
                    if bucket.has_masters and piece.index in members:
                        yield self._shard_of(piece, MASTER, piece.values)
        for index in sorted(self._taken_as_parameters):
            yield from self._parameter_as_master(index)

    def _parameter_as_master(self, index: int) -> Iterator[TensorShard]:
        """Yield what is here of a parameter itself, under the state ``"master"``, to be written to.

        Args:
            index: The parameter's number; this run keeps no masters of it.
        """
        zero = self._required_engine()
        zero.gatherer.wait()
        bucket = zero.layout.bucket_of(index)
        if bucket.keep is Keep.ALWAYS:
            yield whole_shard(self._names[index], MASTER, zero.layout.parameters[index], is_owner=False)
            return
        with bucket.in_use(Role.PARAM, changes=True):
            piece = bucket.piece_of.get(index)
            if piece is not None:
                yield self._shard_of(piece, MASTER, piece.values, is_owner=False)

    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        return {name: scalars for group in self._groups() for name, _, scalars in group.states() if scalars}

    def unsaved_state(self) -> Sequence[str]:
        found: list[str] = []
        for hosted in self._required_engine().hosted:
            with hosted.showing_pieces():
                found += unsaved_state(hosted.optimizer)
        return found

    def param_groups(self) -> Sequence[ParamGroup]:
        return [group.described() for group in self._groups()]

    def _groups(self) -> list[ListedGroup]:
        """Return the parameter groups of all optimizers."""
        return [group for hosted in self._required_engine().hosted for group in hosted.listed()]

    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        zero = self._required_engine()
        listed = self._groups()
        for group, saved in zip(listed, groups, strict=True):
            group.set_options(saved.options)
        group_of = {name: group for group in listed for name in group.names}
        # One bucket after the other, so that at most a bucket's worth is in memory on its way to files.
        for bucket in zero.layout.buckets:
            made: dict[int, State] = {}
            for piece in bucket.pieces:
                name = self._names[piece.index]
                if name in group_of:
                    if not piece.is_whole:
                        refuse_parts(f"'{name}' can't be loaded", scalars.get(name, {}))
                    metas = {key: piece_meta(key, meta, piece) for key, meta in tensors.get(name, {}).items()}
                    state = group_of[name].restore(name, metas, scalars.get(name, {}))
                    if state:
                        made[piece.index] = state
            if made:
                bucket.keep_state(made)
        # Without masters of its own, a run takes the true values as its parameters.
        self._taken_as_parameters = {
            slot.index
            for bucket in zero.layout.buckets
            for slot in bucket.plan.slots
            if not bucket.has_masters
            and (name := self._names[slot.index]) in group_of
            and MASTER in tensors.get(name, {})
        }

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        if self._gatherer is None:
            return
        self._gatherer.wait()
        for bucket in self._buckets:
            if model or any(slot.index in self._taken_as_parameters for slot in bucket.plan.slots):
                with bucket.in_use(changes=True):
                    bucket.take_working_values()
        if optimizer:
            self._gatherer.publish(self._buckets_with_masters())
        self._taken_as_parameters = set()
        self._gatherer.release_all()
        for bucket in self._buckets:
            if bucket.keep is not Keep.ALWAYS:
                bucket.increment_versions()

    def _buckets_with_masters(self) -> list[Bucket]:
        """Return the buckets whose optimizer updates a copy in another format."""
        return [bucket for bucket in self._buckets if bucket.has_masters]

    def _shard_of(self, piece: BucketPiece, state: str | None, tensor: Tensor, *, is_owner: bool = True) -> TensorShard:
        """Return the shard of a piece's values or state."""
        assert self.layout is not None, "a piece is of a bucket"
        is_owner = is_owner and self.layout.ranks_of(piece.index).replica_rank == 0
        return piece_shard(self._names[piece.index], state, piece, tensor, is_owner=is_owner)

    def _required_engine(self) -> ShardedEngine:
        """Return the engine, whose optimizers a call is about."""
        if self.sharded is None:
            msg = "There is no optimizer to save or load: none was passed with the model."
            raise CheckpointError(msg)
        return self.sharded
