"""`LowLevelZeroPlugin`: ZeRO stages 1 and 2 behind `Booster`; wires the parts of this package together."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import (
    Boosted,
    Capability,
    GradientScaling,
    like,
    unwrap_model,
)
from booster_core.precision import PrecisionPolicy
from booster_runtime.sharding import (
    RanksOfWorld,
    check_distinct_memory,
    note_reductions,
    refuse_all_gradients,
    refuse_renormalized,
)
from booster_runtime.strategy import OF_LOSS_SCALE, OF_PRECISION, STRATEGY_TRAINING, Strategy, config_of
from booster_zero.config import ZeroConfig
from booster_zero.engine.engine import ShardedEngine, engine_of
from booster_zero.engine.gatherer import Gatherer
from booster_zero.engine.layout import ListedParameters
from booster_zero.engine.memory import Memory
from booster_zero.engine.optimizer import ShardedOptimizer, holder_of, keeping_gradients, set_gradient
from booster_zero.engine.partition import default_bucket_bytes
from booster_zero.engine.state import ShardedStateAdapter
from booster_zero.model import ShardedModel, fill_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from booster_core.plugin import BoostContext, ModelWrapper
    from booster_runtime.lazy import Recording
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.options import ShardingOptions

__all__ = ["BucketStrategy", "LowLevelZeroPlugin"]


class BucketStrategy(Strategy):
    """A strategy that keeps gradients and optimizer state in buckets, split over the ranks.

    Args:
        config: Options.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.
    """

    placeholders: ClassVar[Literal["device", "own"] | None] = "device"
    capabilities: ClassVar[frozenset[Capability]] = STRATEGY_TRAINING | {
        Capability.DATA_PARALLEL,
        Capability.SEVERAL_OPTIMIZERS,
    }

    config: ShardingOptions

    def __init__(self, config: ShardingOptions, precision: PrecisionPolicy | str | None) -> None:
        self.config = config
        self.precision = None if precision is None else PrecisionPolicy.parse(precision)
        self._ranks = RanksOfWorld(config.replica_size)

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the policy with working parameters in the compute format, and masters of them where it is narrow.

        Raises:
            ConfigError: If ``reduce_dtype`` and ``communication_dtype`` differ, or fp32 compute is to have masters.
        """
        return self.config.resolve_precision(policy, self.name)

    def full_gradient(self, model: ModelWrapper, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter, averaged over ranks, put together from its shards."""
        parameter = unwrap_model(model).get_parameter(name)
        holder = holder_of(model.boosted_optimizers, parameter)
        return None if holder is None else holder.full_gradient(parameter)

    def set_full_gradient(self, model: ModelWrapper, name: str, values: Tensor) -> None:
        """Replace a parameter's gradient in the shards, which `full_gradient` has returned just before.

        Raises:
            ConfigError: If the boosted optimizer does not hold the parameter.
        """
        set_gradient(model.boosted_optimizers, unwrap_model(model).get_parameter(name), values, name)


class LowLevelZeroPlugin(BucketStrategy):
    """Data parallelism whose optimizer state (stage 1) and gradients (stage 2) are split over the ranks.

    `ZeroConfig` documents the keywords of the signature, and `ShardingOptions` those that it shares with Gemini.

    Args:
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Memory per rank and step, for N ranks: parameters; gradients as buckets underway and 1/N of their sum; 1/N of
    optimizer state and masters. Stage 1's ``no_sync`` keeps all gradients, from its second micro-batch on in fp32: 4
    bytes for each element of a parameter, also where that is in bf16 or fp16.
    Communication per rank and step: one reduce-scatter of the gradients and one all-gather of the parameters.
    Reference: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054).
    """

    config: ZeroConfig
    name: ClassVar[str] = "zero"
    api_version: ClassVar[int] = 2
    renamed_arguments: ClassVar[Mapping[str, str]] = {
        **OF_LOSS_SCALE,
        **OF_PRECISION,
        "reduce_bucket_size_in_m": "pass `bucket_bytes=`, in bytes: `12 * 2**20 * 4` for 12 in fp32",
        "extra_dp_size": "pass `replica_size=`",
        "offload_dir": "use `GeminiPlugin(shard_param_frac=0.0, offload_optim_frac=1.0, offload_dir=...)`",
    }

    def __init__(
        self,
        *,
        stage: int = 1,
        max_norm: float = 0.0,
        bucket_bytes: int | None = None,
        overlap_communication: bool = True,
        communication_dtype: torch.dtype | str | None = None,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        offload: str | None = None,
        master_weights: bool = True,
        replica_size: int = 1,
        partition: str = "auto",
        unused: str = "zero",
        broadcast_buffers: bool = True,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        if stage not in (1, 2):
            msg = (
                f"`stage={stage!r}` is not one of 1 (optimizer state) and 2 (gradients too). To shard parameters, use "
                "plugin='gemini', 'fsdp', or 'hybrid' with `zero_stage=3`."
            )
            raise ConfigError(msg)
        super().__init__(config_of(ZeroConfig, locals()), precision)

    @classmethod
    def settings_to_plan(cls, world_size: int) -> list[dict[str, Any]]:
        """Return the settings that ``booster plan`` compares."""
        del world_size
        return [{"stage": 1}, {"stage": 2}]

    def offloading(self) -> str | None:
        """Return the option that offloads, if any; ``booster plan`` can't tell device and host memory apart."""
        return f"offload={self.config.offload!r}" if self.config.offload else None

    def check_model(self, objects: Boosted, context: BoostContext) -> None:
        """Refuse parameters that share memory, and embeddings that change their table in forward."""
        check_distinct_memory(objects.model)
        if context.coordinator.world_size > 1:
            refuse_renormalized(objects.model)

    def shard(self, objects: Boosted, context: BoostContext, values: Recording | None) -> Boosted:
        """Lay the trained parameters out in buckets, and let the optimizer update this rank's part of them.

        Raises:
            ConfigError: If ``replica_size`` does not divide the number of ranks, the optimizer or a parameter can't
                be sharded, or ranks built different models.
            CheckpointError: If a file that a lazy model's values come from can't be read.

        Collective: every rank of the world.
        """
        boosted = self.shard_over(objects, context, self._ranks.get())
        if values is not None:
            model: Any = boosted.model
            model.attach(boosted.optimizers, context)
            adapter = self.state_adapter(model, context)
            fill_model(objects.model, values, adapter.shards_to_fill(), context, adapter.layout)
        return boosted

    def shard_over(
        self,
        objects: Boosted,
        context: BoostContext,
        ranks: ShardingRanks,
        engine_class: Callable[..., ShardedEngine] = ShardedEngine,
        optimizer_class: Callable[..., ShardedOptimizer] = ShardedOptimizer,
        model_class: Callable[..., ShardedModel] = ShardedModel,
        copies: Mapping[int, tuple[int, ...]] | None = None,
        ranks_of: Mapping[int, ShardingRanks] | None = None,
    ) -> Boosted:
        """Shard a model that is on its device already, over ranks that have the same values of it or none yet.

        For strategies that are composed with this one, and have ranks that hold other parts of the model.

        Args:
            objects: As for `shard`.
            context: As for `shard`.
            ranks: The ranks that share the state.
            engine_class: What keeps the shards.
            optimizer_class: What steps them.
            model_class: What runs the model.
            copies: For parameters that several stages of a pipeline hold, by ``id``: `Format.copies`.
            ranks_of: For parameters that others share than ``ranks``, by ``id``: `Format.ranks`.

        Raises:
            ConfigError: As for `shard`.

        Collective: every rank of the world.
        """
        model, config, given = objects.model, self.config, objects.optimizers
        host = torch.device("cpu") if config.offload else None
        listed = ListedParameters(given, config.partition)
        format_of = config.formats(
            model, context.precision, context.device, listed=listed, step_device=host, copies=copies, ranks=ranks_of
        )
        engine, optimizers = None, []
        if given:
            reduced = [each for each in model.parameters() if each.requires_grad or each in listed]
            gradient_bytes = sum(parameter.numel() * format_of(parameter).wire.itemsize for parameter in reduced)
            bucket_bytes = config.bucket_bytes or default_bucket_bytes(
                gradient_bytes, ranks.shard_size, stage=config.stage
            )
            gatherer = Gatherer(
                model, ranks, memory=Memory(), bucket_bytes=bucket_bytes, overlaps=config.overlap_allgather
            )
            engine = engine_class(
                model,
                given,
                config=config,
                listed=listed,
                gatherer=gatherer,
                format_of=format_of,
                device=context.device,
            )
            scaling = GradientScaling(context.precision)
            optimizers = [
                optimizer_class(engine, number, offloads=host is not None, context=context, scaling=scaling)
                for number in range(len(given))
            ]
            buckets = engine.layout.buckets
            sent = {bucket.format.wire for bucket in buckets}
            is_rounded = any(bucket.averages_at_once for bucket in buckets)
            note_reductions(model, sent, context.device, is_rounded=is_rounded)
        else:
            refuse_all_gradients(model)
        for parameter in model.parameters():  # those that are not reduced
            parameter.data = parameter.data.to(format_of(parameter).working)
        wrapped = model_class(model, precision=context.precision, sharded=engine)
        return objects._replace(model=wrapped, optimizer=like(objects.optimizer, optimizers))

    def state_adapter(self, model: ModelWrapper, context: BoostContext) -> ShardedStateAdapter:
        """Return the view of parameters, masters and sharded optimizer state."""
        return ShardedStateAdapter(model, engine_of(model.boosted_optimizers), context.coordinator)

    def no_sync(self, model: ModelWrapper) -> AbstractContextManager[None]:
        """Return a context in which stage 1 accumulates whole gradients here, in fp32.

        From stage 2 on each is reduced into its shard, and the last backward averages over the replicas of shards.
        """
        return keeping_gradients(model.boosted_optimizer, in_shards=self.config.stage > 1)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return asdict(self.config)
