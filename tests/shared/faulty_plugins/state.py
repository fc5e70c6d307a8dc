"""Mutants of `ReferencePlugin` whose checkpoints lack something or mean something else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from reference_plugins import ReferencePlugin, ReferenceStateAdapter
from typing_extensions import override

from booster_core.plugin import unwrap_model
from booster_core.state import NamedTensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from booster_core.state import ParamGroup, TensorMeta, TensorShard


class _NoMasters(ReferenceStateAdapter):
    @override
    def master_shards(self) -> Iterator[TensorShard]:
        return iter(())


class ForgetsMasters(ReferencePlugin):
    """Does not save masters."""

    adapter_class: ClassVar[type[ReferenceStateAdapter]] = _NoMasters


class _KeepsOwnOptions(ReferenceStateAdapter):
    @override
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, Any]],
        groups: Sequence[ParamGroup],
    ) -> None:
        super().prepare_optimizer_load(tensors, scalars, self.param_groups())


class IgnoresSavedLearningRate(ReferencePlugin):
    """Keeps the options of its own parameter groups when it loads."""

    adapter_class: ClassVar[type[ReferenceStateAdapter]] = _KeepsOwnOptions


_SWAPPED = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}


class _SwapsMoments(ReferenceStateAdapter):
    @override
    def optimizer_shards(self) -> Iterator[TensorShard]:
        for shard in super().optimizer_shards():
            yield replace(shard, state=_SWAPPED.get(shard.state or "", shard.state))


class SwapsMoments(ReferencePlugin):
    """Saves and loads each of Adam's moments under the name of the other one."""

    adapter_class: ClassVar[type[ReferenceStateAdapter]] = _SwapsMoments


class _NoBuffers(ReferenceStateAdapter):
    @override
    def model_shards(self) -> Iterator[TensorShard]:
        buffers = {name for name, _ in unwrap_model(self.model).named_buffers()}
        return (shard for shard in super().model_shards() if shard.name not in buffers)


class ForgetsBuffers(ReferencePlugin):
    """Neither saves nor loads buffers."""

    adapter_class: ClassVar[type[ReferenceStateAdapter]] = _NoBuffers


class _NoExtraState(ReferenceStateAdapter):
    @override
    def extra_state(self) -> Mapping[str, object]:
        return {}

    @override
    def load_extra_state(self, values: Mapping[str, object]) -> None:
        pass


class ForgetsExtraState(ReferencePlugin):
    """Neither saves nor loads the extra state of modules."""

    adapter_class: ClassVar[type[ReferenceStateAdapter]] = _NoExtraState


class _NoFirstParameter(ReferenceStateAdapter):
    @override
    def model_shards(self) -> Iterator[TensorShard]:
        first = next(iter(NamedTensors.of(unwrap_model(self.model)).tensors))
        return (shard for shard in super().model_shards() if shard.name != first)


class ForgetsParameter(ReferencePlugin):
    """Neither saves nor loads the model's first parameter."""

    adapter_class: ClassVar[type[ReferenceStateAdapter]] = _NoFirstParameter
