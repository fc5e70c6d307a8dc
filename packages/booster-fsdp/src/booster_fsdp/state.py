"""FSDP's state for checkpoints: DTensors, and the state of parameters that one rank steps whole."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from typing_extensions import override

from booster_core.state import MASTER, NamedTensors
from booster_runtime.sharding import DTensorStateAdapter, whole_shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from booster_core.ranks import DistCoordinator
    from booster_core.state import JSONValue, ParamGroup, TensorMeta, TensorShard
    from booster_fsdp.optimizer import FSDPOptimizer
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
        self._units = units
        self._sharded = optimizer
        super().__init__(model, optimizer, coordinator, prepare=units.reshard)

    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        self._prepare()
        self._required_optimizers()
        assert self._sharded is not None
        parameters = NamedTensors.of(self._module).tensors
        of_all = []
        for name, state, tensor in self._state_tensors():
            if state != MASTER and self._sharded.is_stepped_whole(parameters[name]):
                yield whole_shard(name, state, tensor, is_owner=self._sharded.ranks.replica_rank == 0)
            else:
                of_all.append((name, state, tensor))
        yield from self._shards(of_all)

    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        self._required_optimizers()
        assert self._sharded is not None
        is_whole = any(self._sharded.is_stepped_whole(parameter) for parameter in self._module.parameters())
        with self._sharded.views.shown() if is_whole else contextlib.nullcontext():
            super().prepare_optimizer_load(tensors, scalars, groups)
        if is_whole:  # parameters that other ranks step take saved masters, too
            self._masters = {name for group in groups for name in group.params if MASTER in tensors.get(name, {})}

    @override
    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        super().finish_load(model=model, optimizer=optimizer)
        self._units.note_update()

    @override
    def _name_of(self) -> Mapping[int, str]:
        names = dict(super()._name_of())
        views = {} if self._sharded is None else self._sharded.views.of
        return names | {id(view): names[id(parameter)] for parameter, view in views.items()}
