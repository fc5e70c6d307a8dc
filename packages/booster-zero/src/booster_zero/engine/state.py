"""The state of a sharded optimizer as shards: flat ranges, or whole parameters by owner, and masters beside them.

How the model's own tensors lie is what strategies add.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from booster_core.errors import CheckpointError
from booster_core.state import JSONValue, ParamGroup, StateAdapter, TensorMeta, TensorShard, full_box
from booster_runtime.sharding import is_cut
from booster_runtime.state import MASTER, Replica, ReplicatedStateAdapter, flatten_state, restore_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from booster_core.ranks import DistCoordinator
    from booster_zero.engine.bucket import Piece
    from booster_zero.engine.optimizer import ShardedOptimizer


OptimizerT = TypeVar("OptimizerT", bound="ShardedOptimizer")


class ShardedStateAdapter(StateAdapter, Generic[OptimizerT]):
    """Shows a model whose optimizer state is split over ranks.

    Args:
        model: The boosted model.
        optimizer: Its optimizer.
        coordinator: Tells rank and number of ranks.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerT | None, coordinator: DistCoordinator | Replica) -> None:
        self.replicated = ReplicatedStateAdapter(model, None, coordinator)
        self.optimizer = optimizer
        self.taken_as_parameters: set[int] = set()

    # ---- the model

    def tied_names(self) -> Mapping[str, str]:
        return self.replicated.tied_names()

    def extra_state(self) -> Mapping[str, object]:
        return self.replicated.extra_state()

    def load_extra_state(self, values: Mapping[str, object]) -> None:
        self.replicated.load_extra_state(values)

    # ---- the optimizer

    def optimizer_shards(self) -> Iterator[TensorShard]:
        sharded = self.required_optimizer()
        states = sharded.hosted.states()
        with_masters = set(self.buckets_with_masters())
        for bucket in sharded.layout.buckets:
            with bucket.at_hand(changes=True):
                for piece in bucket.pieces:
                    tensors, _ = flatten_state(sharded.names[piece.index], states.get(piece.index, {}))
                    for key, tensor in tensors.items():
                        is_elementwise = is_cut(key, tensor, piece.values.shape)
                        yield (self.cut_shard if is_elementwise else self._own_shard)(piece, key, tensor)
                    if bucket in with_masters:
                        yield self.cut_shard(piece, MASTER, piece.values)
        for index in sorted(self.taken_as_parameters):
            yield from self.parameter_as_master(index)

    @abstractmethod
    def parameter_as_master(self, index: int) -> Iterator[TensorShard]:
        """Yield what lies here of a parameter itself, under the state ``"master"``, to be written to.

        Args:
            index: The parameter's number; this run keeps no masters of it.
        """

    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        sharded = self.required_optimizer()
        scalars = {}
        for index, state in sharded.hosted.states().items():
            _, others = flatten_state(sharded.names[index], state)
            if others:
                scalars[sharded.names[index]] = others
        return scalars

    def param_groups(self) -> Sequence[ParamGroup]:
        sharded = self.required_optimizer()
        return [
            ParamGroup(
                params=tuple(sharded.names[index] for index in members),
                options={
                    key: value.item() if isinstance(value, torch.Tensor) else value
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                },
            )
            for members, group in zip(sharded.hosted.groups, sharded.param_groups, strict=True)
        ]

    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        sharded = self.required_optimizer()
        pieces, states = sharded.layout.pieces(), sharded.hosted.states()
        homes = {piece.index: bucket for bucket in sharded.layout.buckets for piece in bucket.pieces}
        keeps_masters = {slot.index for bucket in self.buckets_with_masters() for slot in bucket.plan.slots}
        self.taken_as_parameters = set()
        for members, group, saved in zip(sharded.hosted.groups, sharded.param_groups, groups, strict=True):
            for key, value in saved.options.items():
                _set_option(group, key, value)
            for index in members:
                name = sharded.names[index]
                stored = dict(tensors.get(name, {}))
                if stored.pop(MASTER, None) is not None and index not in keeps_masters:
                    # Without masters of its own, a run takes the true values as its parameters.
                    self.taken_as_parameters.add(index)
                piece = pieces.get(index)
                if piece is None:
                    continue
                room = {key: _cut_meta(key, meta, piece) for key, meta in stored.items()}
                state = restore_state(piece.values, group, states.get(index, {}), room, scalars.get(name, {}))
                sharded.hosted.set_state(index, state)
                # One after the other, so that never more than a bucket's worth is in RAM that is to lie in files.
                if state:
                    homes[index].house({index: state})

    def buckets_with_masters(self) -> list[Any]:
        """Return the buckets whose optimizer updates a copy in another format."""
        sharded = self.required_optimizer()
        return [bucket for bucket in sharded.layout.buckets if bucket.format.working != bucket.format.master]

    def cut_shard(self, piece: Piece, state: str, tensor: Tensor) -> TensorShard:
        """Return the shard of a tensor that is cut as its parameter is."""
        sharded = self.required_optimizer()
        shape = tuple(piece.parameter.shape)
        return TensorShard(
            name=sharded.names[piece.index],
            state=state,
            global_shape=shape,
            dtype=tensor.dtype,
            box=full_box(shape),
            flat=None if piece.is_whole else (piece.start, piece.stop),
            data=tensor.detach(),
            is_owner=sharded.ranks.replica_rank == 0,
        )

    def _own_shard(self, piece: Piece, state: str, tensor: Tensor) -> TensorShard:
        """Return the shard of a tensor with a shape of its own, equal wherever there is a part of the parameter."""
        sharded = self.required_optimizer()
        shape = tuple(tensor.shape)
        return TensorShard(
            name=sharded.names[piece.index],
            state=state,
            global_shape=shape,
            dtype=tensor.dtype,
            box=full_box(shape),
            data=tensor.detach(),
            is_owner=piece.start == 0 and sharded.ranks.replica_rank == 0,
        )

    def required_optimizer(self) -> OptimizerT:
        """Return the optimizer, which a call is about."""
        if self.optimizer is None:
            msg = "There is no optimizer to save or load: none was passed with the model."
            raise CheckpointError(msg)
        return self.optimizer


def _cut_meta(key: str, meta: TensorMeta, piece: Piece) -> TensorMeta:
    """Return what a piece needs room for, of a tensor of the whole parameter."""
    is_elementwise = key != "step" and meta.shape == tuple(piece.parameter.shape)
    return TensorMeta(shape=tuple(piece.values.shape), dtype=meta.dtype) if is_elementwise else meta


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, torch.Tensor):
        present.fill_(value)
    else:
        group[key] = value
