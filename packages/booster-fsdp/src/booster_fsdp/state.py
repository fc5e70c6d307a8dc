"""FSDP's state for checkpoints: the model's DTensors, and the optimizer's state of this rank's pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from booster_core.errors import CheckpointError
from booster_core.state import JSONValue, ParamGroup, TensorMeta, TensorShard, full_box
from booster_runtime.sharding import DTensorStateAdapter, dtensor_shards, is_cut
from booster_runtime.state import MASTER, flatten_state, restore_state, unsaved_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from booster_core.ranks import DistCoordinator
    from booster_fsdp.optimizer import FSDPOptimizer
    from booster_fsdp.pieces import ParameterPiece
    from booster_fsdp.units import Units


class FSDPStateAdapter(DTensorStateAdapter):
    """List the shards of a sharded model and of its optimizer's state.

    Args:
        model: The boosted model.
        optimizer: Its optimizer.
        coordinator: Provides the rank and the number of ranks.
        units: The model's units.
    """

    def __init__(
        self, model: nn.Module, optimizer: FSDPOptimizer | None, coordinator: DistCoordinator, units: Units
    ) -> None:
        super().__init__(model, None, coordinator, prepare=units.reshard)
        self._units = units
        self._sharded = optimizer
        self._taken_as_parameters: list[int] = []

    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        sharded = self._required()
        for index, state in sharded.hosted.states().items():
            piece = sharded.pieces[index]
            tensors, _ = flatten_state(sharded.names[index], state)
            for key, tensor in tensors.items():
                yield self._state_shard(piece, key, tensor)
        for index in self._taken_as_parameters:
            name, parameter = sharded.names[index], sharded.parameters[index]
            if isinstance(parameter, DTensor):
                yield from dtensor_shards(name, MASTER, parameter)
            else:
                yield _whole_shard(name, MASTER, parameter, is_owner=False)

    @override
    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        sharded = self._required()
        scalars = {}
        for index, state in sharded.hosted.states().items():
            _, others = flatten_state(sharded.names[index], state)
            if others:
                scalars[sharded.names[index]] = others
        return scalars

    @override
    def unsaved_state(self) -> Sequence[str]:
        return unsaved_state(self._required().unwrap())

    @override
    def param_groups(self) -> Sequence[ParamGroup]:
        sharded = self._required()
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

    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        sharded = self._required()
        states = sharded.hosted.states()
        self._taken_as_parameters = []
        for members, group, saved in zip(sharded.hosted.groups, sharded.param_groups, groups, strict=True):
            for key, value in saved.options.items():
                _set_option(group, key, value)
            for index in members:
                stored = dict(tensors.get(sharded.names[index], {}))
                if stored.pop(MASTER, None) is not None:
                    # The parameters are fp32 here, so masters are loaded into them.
                    self._taken_as_parameters.append(index)
                piece = sharded.pieces.get(index)
                if piece is None:
                    continue
                room = {key: _cut_meta(key, meta, piece) for key, meta in stored.items()}
                others = scalars.get(sharded.names[index], {})
                state = restore_state(piece.values, group, states.get(index, {}), room, others)
                sharded.hosted.set_state(index, state)

    @override
    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        self._taken_as_parameters = []
        if model:
            self._units.note_update()

    def _state_shard(self, piece: ParameterPiece, key: str, tensor: Tensor) -> TensorShard:
        sharded = self._required()
        name, shape = sharded.names[piece.index], tuple(piece.parameter.shape)
        is_first = sharded.ranks.replica_rank == 0 and (not piece.is_shared or sharded.ranks.shard_rank == 0)
        if not is_cut(key, tensor, piece.values.shape):
            return _whole_shard(name, key, tensor, is_owner=is_first and piece.start == 0)
        if piece.stop - piece.start == piece.parameter.numel():
            return _whole_shard(name, key, tensor.view(shape), is_owner=is_first)
        return TensorShard(
            name=name,
            state=key,
            global_shape=shape,
            dtype=tensor.dtype,
            box=full_box(shape),
            flat=(piece.start, piece.stop),
            data=tensor.detach().view(-1),
            is_owner=is_first,
        )

    def _required(self) -> FSDPOptimizer:
        if self._sharded is None:
            msg = "There is no optimizer to save or load: none was passed with the model."
            raise CheckpointError(msg)
        return self._sharded


def _whole_shard(name: str, state: str, tensor: Tensor, *, is_owner: bool) -> TensorShard:
    shape = tuple(tensor.shape)
    return TensorShard(
        name=name,
        state=state,
        global_shape=shape,
        dtype=tensor.dtype,
        box=full_box(shape),
        data=tensor.detach(),
        is_owner=is_owner,
    )


def _cut_meta(key: str, meta: TensorMeta, piece: ParameterPiece) -> TensorMeta:
    """Return the shape and dtype of this piece's part of a state tensor."""
    is_elementwise = key != "step" and meta.shape == tuple(piece.parameter.shape)
    return TensorMeta(shape=tuple(piece.values.shape), dtype=meta.dtype) if is_elementwise else meta


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, torch.Tensor):
        present.fill_(value)
    else:
        group[key] = value
