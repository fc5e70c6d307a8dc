"""`HybridParallelPlugin`: tensor, pipeline, sequence and data parallelism behind `Booster`.

This version trains with tensor and data parallelism. Pipelines have their parts in `booster_hybrid.pipeline`, which
nothing drives yet; asking for them, or for sequence parallelism, raises.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from booster_core.errors import PluginError
from booster_core.mesh import Axis, MeshShape, fill_axis, make_axes
from booster_core.plugin import Boosted, Capability, Plugin
from booster_core.precision import PrecisionPolicy
from booster_core.replicated import place_model
from booster_core.sharding.agreement import agree_on_values
from booster_core.sharding.ranks import ShardingRanks
from booster_core.state.naming import NamedTensors
from booster_core.state.replicated import Place
from booster_core.wrappers import unwrap_model
from booster_hybrid.config import HybridConfig, PipelineConfig, SequenceConfig, TensorConfig
from booster_hybrid.optimizer import HybridOptimizer
from booster_hybrid.policy.registry import policy_for
from booster_hybrid.state import HybridStateAdapter
from booster_hybrid.tensor_parallel.apply import TensorParallelModel, parallelize
from booster_hybrid.tensor_parallel.group import TensorGroup
from booster_zero import LowLevelZeroPlugin, ZeroConfig
from booster_zero.state import ZeroStateAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext
    from booster_core.state.adapter import StateAdapter
    from booster_hybrid.policy.base import ShardingPolicy


class HybridParallelPlugin(Plugin):
    """Each layer split over tensor parallel ranks, and data parallelism over the ranks that these leave.

    Args:
        tp_size: Ranks over which each layer is split.
        pp_size: Number of pipeline stages; this version trains with 1.
        sp_size: Ranks over which each sequence is split; this version trains with 1.
        num_microbatches: See `PipelineConfig`; ``None`` means one for each stage.
        pp_style: See `PipelineConfig`.
        sequence_parallelism_mode: See `SequenceConfig`.
        zero_stage: 0 replicates the optimizer state over the data parallel ranks, 1 and 2 shard it by ZeRO.
        parallel_output: Leave the logits of language models split by vocabulary, so that the whole ones never exist:
            ``outputs.logits`` are `SplitLogits`, on which the model's own loss and cross entropy work as on whole
            ones; what would be wrong on a part raises. ``False`` puts them together.
        custom_policy: How the model is split, where it is not one that is known; see
            `booster_hybrid.policy.base.ShardingPolicy`.
        max_norm: Clip gradients by this global norm in each step; 0 does not.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053).
    """

    name: ClassVar[str] = "hybrid"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.CPU,
            Capability.CUDA,
            Capability.FP32,
            Capability.BF16,
            Capability.FP16,
            Capability.DATA_PARALLEL,
            Capability.SYNCHRONOUS,
        }
    )

    def __init__(
        self,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int = 1,
        num_microbatches: int | None = None,
        pp_style: str = "1f1b",
        sequence_parallelism_mode: str | None = None,
        zero_stage: int = 0,
        parallel_output: bool = False,
        custom_policy: ShardingPolicy | None = None,
        max_norm: float = 0.0,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = HybridConfig(
            tensor=TensorConfig(size=tp_size),
            pipeline=PipelineConfig(
                size=pp_size,
                num_microbatches=pp_size if num_microbatches is None else num_microbatches,
                style=pp_style,
            ),
            sequence=SequenceConfig(size=sp_size, mode=sequence_parallelism_mode),
            zero=None if zero_stage == 0 else ZeroConfig(stage=zero_stage),
        )
        self.parallel_output = parallel_output
        self.custom_policy = custom_policy
        self.precision = None if precision is None else PrecisionPolicy.parse(precision)
        self._zero = LowLevelZeroPlugin(stage=max(zero_stage, 1), max_norm=max_norm, precision=precision)
        self._axes: tuple[Any, dict[tuple[str, ...], Axis]] | None = None

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the policy with working parameters in the compute format, and masters beside them where it is narrow.

        Raises:
            ConfigError: If fp32 compute is to have masters.
        """
        return self._zero.resolve_precision(policy)

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Split the model's layers, then shard what the optimizer updates over the data parallel ranks.

        Raises:
            ConfigError: If the sizes do not divide the world, the model has no policy, or its sizes can't be split.
            PluginError: If a pipeline or sequence parallelism is asked for.

        Collective: every rank of the world.
        """
        self._check_built()
        axes = self._axes_of_world()
        model = objects.model
        place_model(model, objects.optimizer, context.device, replace(context.precision, param_dtype=None))
        agree_on_values(model)
        tensor = axes["tp",]
        group = TensorGroup(tensor.group, tensor.index, tensor.size)
        split = TensorParallelModel()
        if tensor.size > 1:
            policy = policy_for(model, self.custom_policy, context.hooks)
            split = parallelize(model, policy, group, parallel_output=self.parallel_output)
            _cut_state(model, objects.optimizer, split)
        boosted = self._zero.shard(objects, context, self._ranks(axes), HybridOptimizer)
        if isinstance(boosted.optimizer, HybridOptimizer):
            boosted.optimizer.splits, boosted.optimizer.tensor_group = split.splits, group
        boosted.model.__dict__["splits"] = split.splits  # no part of the model: neither module nor tensor
        return boosted

    def data_parallel_coordinates(self, context: BoostContext) -> tuple[int, int]:
        """Return this rank's index along the data parallel axis, and its size."""
        shape = self._shape(context.coordinator.world_size)
        return shape.coordinates(context.coordinator.rank)["dp"], shape.sizes["dp"]

    def state_adapter(self, model: nn.Module, optimizer: Optimizer | None, context: BoostContext) -> StateAdapter:
        """Return the view of what is split and sharded, in the shapes of the user's own model."""
        del context
        axes = self._axes_of_world()
        hybrid = optimizer if isinstance(optimizer, HybridOptimizer) else None
        inner = ZeroStateAdapter(model, hybrid, Place(axes["dp",].index, axes["dp",].size))
        return HybridStateAdapter(inner, model.__dict__["splits"], is_first=axes["tp",].index == 0)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate here; under ZeRO 2 each is reduced into its shard."""
        return self._zero.no_sync(model, optimizer)

    def full_gradient(self, model: nn.Module, optimizer: Optimizer | None, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter, in the shape that it has in the user's model."""
        parameter = unwrap_model(model).get_parameter(name)
        if isinstance(optimizer, HybridOptimizer) and optimizer.holds(parameter):
            return optimizer.full_gradient(parameter)
        return self._zero.full_gradient(model, optimizer, name)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return {**asdict(self.config), "parallel_output": self.parallel_output}

    def _check_built(self) -> None:
        sequence = self.config.sequence
        asked = {
            "pp_size": self.config.pipeline.size if self.config.pipeline.size > 1 else None,
            "sequence_parallelism_mode": sequence.mode,
        }
        for name, value in asked.items():
            if value is not None:
                msg = (
                    f"`{name}={value!r}`: booster-hybrid 0.1 trains with tensor and data parallelism only. Use "
                    "`tp_size`, and `zero_stage` for the optimizer's state."
                )
                raise PluginError(msg)

    def _shape(self, world_size: int) -> MeshShape:
        sizes = {"dp": 1, "pp": self.config.pipeline.size, "sp": self.config.sequence.size}
        return fill_axis({**sizes, "tp": self.config.tensor.size}, "dp", world_size)

    def _axes_of_world(self) -> dict[tuple[str, ...], Axis]:
        """Return this rank's place; process groups are made once for each world."""
        world = dist.group.WORLD
        if self._axes is None or self._axes[0] is not world:
            self._axes = (world, make_axes(self._shape(dist.get_world_size()), [("tp",), ("dp",), ()]))
        return self._axes[1]

    def _ranks(self, axes: Mapping[tuple[str, ...], Axis]) -> ShardingRanks:
        """Return who shares the optimizer's state: the data parallel ranks, or nobody, who are then replicas."""
        data = axes["dp",]
        if self.config.zero is None:
            return ShardingRanks(
                shard_group=axes[()].group,
                shard_rank=0,
                shard_size=1,
                replica_group=data.group if data.size > 1 else None,
                replica_rank=data.index,
            )
        return ShardingRanks(shard_group=data.group, shard_rank=data.index, shard_size=data.size)


def _cut_state(model: nn.Module, optimizer: Optimizer | None, split: TensorParallelModel) -> None:
    """Keep this rank's part of the state that an optimizer has already."""
    if optimizer is None:
        return
    name_of = NamedTensors.of(model).name_of
    for parameter, state in optimizer.state.items():
        part = split.splits.get(name_of.get(id(parameter), ""))
        for key, value in state.items():
            if part is not None and hasattr(value, "shape") and tuple(value.shape) == part.global_shape:
                state[key] = part.take(value)
