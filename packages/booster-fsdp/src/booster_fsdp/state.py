"""FSDP's state as shards: the model's DTensors, and the state of the pieces that the optimizer updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from typing_extensions import override

from booster_core.errors import CheckpointError
from booster_runtime.sharding import DTensorStateAdapter, dtensor_shards, piece_shard, whole_shard
from booster_runtime.state import MASTER, flatten_state, unsaved_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from booster_core.ranks import DistCoordinator
    from booster_core.state import JSONValue, ParamGroup, TensorMeta, TensorShard
    from booster_fsdp.optimizer import FSDPOptimizer
    from booster_fsdp.pieces import RowsPiece
    from booster_fsdp.units import Units


class FSDPStateAdapter(DTensorStateAdapter):
    """Shows a sharded model, and its optimizer's state piece by piece.

    Args:
        model: The boosted model.
        optimizer: Its optimizer.
        coordinator: Tells rank and number of ranks.
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
                yield whole_shard(name, MASTER, parameter, is_owner=False)

    @override
    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        return self._required().hosted.scalars()

    @override
    def unsaved_state(self) -> Sequence[str]:
        return unsaved_state(self._required().unwrap())

    @override
    def param_groups(self) -> Sequence[ParamGroup]:
        return self._required().hosted.param_groups()

    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        # The parameters are the true values here, and take saved masters.
        self._taken_as_parameters = self._required().hosted.prepare_load(tensors, scalars, groups)

    @override
    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        self._taken_as_parameters = []
        if model:
            self._units.note_update()

    def _state_shard(self, piece: RowsPiece, key: str, tensor: Tensor) -> TensorShard:
        sharded = self._required()
        is_owner = sharded.ranks.replica_rank == 0 and (not piece.is_shared or sharded.ranks.shard_rank == 0)
        return piece_shard(sharded.names[piece.index], key, piece, tensor, is_owner=is_owner)

    def _required(self) -> FSDPOptimizer:
        if self._sharded is None:
            msg = "There is no optimizer to save or load: none was passed with the model."
            raise CheckpointError(msg)
        return self._sharded
