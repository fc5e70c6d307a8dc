"""ZeRO's state as shards: parameters whole on every rank, optimizer state and masters in flat ranges or by owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import CheckpointError
from booster_core.sharding.hosting import is_cut
from booster_core.state.adapter import JSONValue, ParamGroup, StateAdapter, TensorMeta
from booster_core.state.optimizer_state import flatten_state, restore_state
from booster_core.state.replicated import MASTER, ReplicatedStateAdapter
from booster_core.state.shard import TensorShard, full_box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from booster_core.coordinator import DistCoordinator
    from booster_core.sharding.bucket import Piece
    from booster_zero.bucket import Bucket
    from booster_zero.optimizer import ZeroOptimizer


class ZeroStateAdapter(StateAdapter):
    """Shows a model whose optimizer state is split over ranks.

    Args:
        model: The boosted model.
        optimizer: Its optimizer.
        coordinator: Tells rank and number of ranks.
    """

    def __init__(self, model: nn.Module, optimizer: ZeroOptimizer | None, coordinator: DistCoordinator) -> None:
        self._replicated = ReplicatedStateAdapter(model, None, coordinator)
        self._optimizer = optimizer
        self._taken_as_parameters: set[int] = set()

    # ---- the model, which every rank has whole

    def model_shards(self) -> Iterator[TensorShard]:
        return self._replicated.model_shards()

    def tied_names(self) -> Mapping[str, str]:
        return self._replicated.tied_names()

    def extra_state(self) -> Mapping[str, object]:
        return self._replicated.extra_state()

    def load_extra_state(self, values: Mapping[str, object]) -> None:
        self._replicated.load_extra_state(values)

    # ---- the optimizer

    def optimizer_shards(self) -> Iterator[TensorShard]:
        zero = self._required_optimizer()
        pieces = zero.layout.pieces()
        for index, state in zero.hosted.states().items():
            tensors, _ = flatten_state(zero.names[index], state)
            for key, tensor in tensors.items():
                if is_cut(key, tensor, pieces[index].values.shape):
                    yield self._cut_shard(pieces[index], key, tensor)
                else:
                    yield self._own_shard(pieces[index], key, tensor)
        for bucket in self._buckets_with_masters():
            for piece in bucket.pieces:
                yield self._cut_shard(piece, MASTER, piece.values)
        for index in sorted(self._taken_as_parameters):
            parameter = zero.layout.parameters[index].detach()
            shape = tuple(parameter.shape)
            yield TensorShard(
                name=zero.names[index],
                state=MASTER,
                global_shape=shape,
                dtype=parameter.dtype,
                box=full_box(shape),
                data=parameter,
                is_owner=False,
            )

    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        zero = self._required_optimizer()
        scalars = {}
        for index, state in zero.hosted.states().items():
            _, others = flatten_state(zero.names[index], state)
            if others:
                scalars[zero.names[index]] = others
        return scalars

    def param_groups(self) -> Sequence[ParamGroup]:
        zero = self._required_optimizer()
        return [
            ParamGroup(
                params=tuple(zero.names[index] for index in members),
                options={
                    key: value.item() if isinstance(value, torch.Tensor) else value
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                },
            )
            for members, group in zip(zero.hosted.groups, zero.param_groups, strict=True)
        ]

    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        zero = self._required_optimizer()
        pieces, states = zero.layout.pieces(), zero.hosted.states()
        homes = {piece.index: bucket for bucket in zero.layout.buckets for piece in bucket.pieces}
        keeps_masters = {slot.index for bucket in self._buckets_with_masters() for slot in bucket.plan.slots}
        self._taken_as_parameters = set()
        for members, group, saved in zip(zero.hosted.groups, zero.param_groups, groups, strict=True):
            for key, value in saved.options.items():
                _set_option(group, key, value)
            for index in members:
                name = zero.names[index]
                stored = dict(tensors.get(name, {}))
                if stored.pop(MASTER, None) is not None and index not in keeps_masters:
                    # Without masters of its own, a run takes the true values as its parameters.
                    self._taken_as_parameters.add(index)
                piece = pieces.get(index)
                if piece is None:
                    continue
                room = {key: _cut_meta(key, meta, piece) for key, meta in stored.items()}
                state = restore_state(piece.values, group, states.get(index, {}), room, scalars.get(name, {}))
                zero.hosted.set_state(index, state)
                # One after the other, so that never more than a bucket's worth is in RAM that is to lie in files.
                if state:
                    homes[index].house({index: state})
        zero.room.check_together("What found no room has it in RAM; nothing has been read yet.")

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        zero = self._optimizer
        if zero is None:
            return
        for bucket in zero.layout.buckets:
            is_taken = any(slot.index in self._taken_as_parameters for slot in bucket.plan.slots)
            if model or is_taken:
                bucket.take_working_values()
                bucket.note_versions()
        if optimizer:
            zero.publish(self._buckets_with_masters())
        self._taken_as_parameters = set()

    def _buckets_with_masters(self) -> list[Bucket]:
        zero = self._required_optimizer()
        return [bucket for bucket in zero.layout.buckets if bucket.format.working != bucket.format.master]

    def _cut_shard(self, piece: Piece, state: str, tensor: Tensor) -> TensorShard:
        """Return the shard of a tensor that is cut as its parameter is."""
        zero = self._required_optimizer()
        shape = tuple(piece.parameter.shape)
        return TensorShard(
            name=zero.names[piece.index],
            state=state,
            global_shape=shape,
            dtype=tensor.dtype,
            box=full_box(shape),
            flat=None if piece.is_whole else (piece.start, piece.stop),
            data=tensor.detach(),
            is_owner=zero.ranks.replica_rank == 0,
        )

    def _own_shard(self, piece: Piece, state: str, tensor: Tensor) -> TensorShard:
        """Return the shard of a tensor with a shape of its own, equal wherever there is a part of the parameter."""
        zero = self._required_optimizer()
        shape = tuple(tensor.shape)
        return TensorShard(
            name=zero.names[piece.index],
            state=state,
            global_shape=shape,
            dtype=tensor.dtype,
            box=full_box(shape),
            data=tensor.detach(),
            is_owner=piece.start == 0 and zero.ranks.replica_rank == 0,
        )

    def _required_optimizer(self) -> ZeroOptimizer:
        if self._optimizer is None:
            msg = "There is no optimizer to save or load: none was passed with the model."
            raise CheckpointError(msg)
        return self._optimizer


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
