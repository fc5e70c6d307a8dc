"""ZeRO's state as shards: parameters whole on every rank, optimizer state and masters in flat ranges or by owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.state import TensorShard, full_box
from booster_runtime.state import MASTER
from booster_zero.engine.state import ShardedStateAdapter
from booster_zero.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from booster_core.state import JSONValue, ParamGroup, TensorMeta


class ZeroStateAdapter(ShardedStateAdapter[ZeroOptimizer]):
    """Shows a model that every rank has whole, and whose optimizer state is split over ranks.

    Args:
        model: The boosted model.
        optimizer: Its optimizer.
        coordinator: Tells rank and number of ranks.
    """

    def model_shards(self) -> Iterator[TensorShard]:
        if self.optimizer is not None:
            self.optimizer.gathers.wait()
        return self.replicated.model_shards()

    def parameter_as_master(self, index: int) -> Iterator[TensorShard]:
        zero = self.required_optimizer()
        zero.gathers.wait()
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

    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        super().prepare_optimizer_load(tensors, scalars, groups)
        self.required_optimizer().room.check_together("What found no room has it in RAM; nothing has been read yet.")

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        zero = self.optimizer
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
