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
    from booster_fsdp.gradients import ShardedGradients
    from booster_fsdp.optimizer import FSDPOptimizer


class FSDPStateAdapter(DTensorStateAdapter):
    """List the shards of a sharded model and of its optimizer's state.

    Args:
        model: The boosted model.
        optimizers: Its optimizers, of which there may be none.
        coordinator: Provides the rank and the number of ranks.
        gradients: The model's; knows when shards have new values.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[FSDPOptimizer],
        coordinator: DistCoordinator,
        gradients: ShardedGradients,
    ) -> None:
        self._gradients = gradients
        self._sharded = optimizers
        for each in optimizers:
            each.views.hide()
        super().__init__(model, optimizers, coordinator, prepare=gradients.reshard)

    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        self._prepare()
        self._required_optimizers()
        parameters = NamedTensors.of(self._module).tensors
        whole = {id(parameter): each for each in self._sharded for parameter in each.stepped_whole()}
        of_all = []
        for name, state, tensor in self._state_tensors():
            optimizer = whole.get(id(parameters[name]))
            if state != MASTER and optimizer is not None:
                yield whole_shard(name, state, tensor, is_owner=optimizer.ranks.replica_rank == 0)
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
        names = {id(tensor): name for name, tensor in NamedTensors.of(self._module).tensors.items()}
        whole = {names[id(parameter)] for each in self._sharded for parameter in each.stepped_whole()}
        with contextlib.ExitStack() as stack:
            for each in self._sharded:
                if each.stepped_whole():
                    each.views.show()
                    stack.callback(each.views.hide)
            super().prepare_optimizer_load(tensors, scalars, groups)
        # Parameters that other ranks step take saved masters, too.
        listed = {name for group in groups for name in group.params}
        self._masters |= {name for name in whole & listed if MASTER in tensors.get(name, {})}

    @override
    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        super().finish_load(model=model, optimizer=optimizer)
        self._gradients.note_update()

    @override
    def _name_of(self) -> Mapping[int, str]:
        names = dict(super()._name_of())
        views = {parameter: view for each in self._sharded for parameter, view in each.views.of.items()}
        return names | {id(view): names[id(parameter)] for parameter, view in views.items()}
