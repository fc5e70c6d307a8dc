"""Mutants of the state adapter of `ReferencePlugin`: checkpoints lack something or mean something else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reference_plugins import ReferenceStateAdapter
from typing_extensions import override

from booster_core.plugin import unwrap_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from booster_core.state import ParamGroup, TensorMeta, TensorShard


class ForgetsMasters(ReferenceStateAdapter):
    """Does not save masters."""

    @override
    def master_shards(self) -> Iterator[TensorShard]:
        return iter(())


class IgnoresSavedLearningRate(ReferenceStateAdapter):
    """Keeps the options of its own parameter groups when it loads."""

    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, Any]],
        groups: Sequence[ParamGroup],
    ) -> None:
        super().prepare_optimizer_load(tensors, scalars, self.param_groups())


_SWAPPED = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}


class SwapsMoments(ReferenceStateAdapter):
    """Saves and loads each of Adam's moments under the name of the other one."""

    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        for shard in super().optimizer_shards():
            yield replace(shard, state=_SWAPPED.get(shard.state or "", shard.state))


class ForgetsBuffers(ReferenceStateAdapter):
    """Neither saves nor loads buffers."""

    @override
    def model_shards(self) -> Iterator[TensorShard]:
        buffers = {name for name, _ in unwrap_model(self.model).named_buffers()}
        return (shard for shard in super().model_shards() if shard.name not in buffers)


class ForgetsExtraState(ReferenceStateAdapter):
    """Neither saves nor loads the extra state of modules."""

    @override
    def extra_state(self) -> Mapping[str, object]:
        return {}

    @override
    def load_extra_state(self, values: Mapping[str, object]) -> None:
        pass
