"""`LowLevelZeroPlugin`: ZeRO stages 1 and 2 behind `Booster`; wires the parts of this package together."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.plugin import (
    Boosted,
    Capability,
    Plugin,
    check_no_masters,
    place_model,
    unscaled_gradient,
    unwrap_model,
)
from booster_core.precision import NARROW, PrecisionPolicy
from booster_runtime import collectives
from booster_runtime.memory import MappedFolder
from booster_runtime.sharding import (
    ShardingRanks,
    agree_on_values,
    check_distinct_memory,
    make_ranks,
    refuse_all_gradients,
    working_dtypes,
)
from booster_zero.config import ZeroConfig
from booster_zero.engine.bucket import Format
from booster_zero.model import ZeroModel
from booster_zero.optimizer import ZeroOptimizer
from booster_zero.room import Room
from booster_zero.state import ZeroStateAdapter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext
    from booster_core.state import StateAdapter


class LowLevelZeroPlugin(Plugin):
    """Data parallelism whose optimizer state (stage 1) and gradients (stage 2) are split over the ranks.

    Args:
        stage: See `ZeroConfig`, which documents this and the following options.
        max_norm: Clip gradients by this global norm in each step.
        bucket_bytes: Size of a bucket.
        overlap_communication: Reduce while backward goes on.
        communication_dtype: Format in which gradients travel.
        overlap_allgather: Gather updated parameters while the next forward begins.
        cpu_offload: Keep optimizer state on the host, and step there.
        offload: Keep it on the host, ``"cpu"``, or on its disk, ``"disk"``.
        offload_dir: The folder for ``offload="disk"``.
        master_weights: Keep fp32 masters of narrow parameters.
        replica_size: Number of replicas of the sharded state.
        partition: Cut parameters anywhere, or leave them whole.
        unused: What to do about parameters that took no part in backward.
        broadcast_buffers: Keep buffers that forward changes equal on all ranks.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.
        TypeError: If ``offload_dir`` is no path.

    Memory per rank and step, for N ranks: parameters; gradients as buckets underway and 1/N of their sum (under stage
    1's ``no_sync`` all of them); 1/N of optimizer state and masters.
    Communication per rank and step: one reduce-scatter of the gradients and one all-gather of the parameters.
    Reference: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054).
    """

    name: ClassVar[str] = "zero"
    api_version: ClassVar[int] = 1
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.CPU,
            Capability.CUDA,
            Capability.FP32,
            Capability.BF16,
            Capability.FP16,
            Capability.LORA,
            Capability.DATA_PARALLEL,
            Capability.SYNCHRONOUS,
        }
    )

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
        offload_dir: str | os.PathLike[str] | None = None,
        master_weights: bool = True,
        replica_size: int = 1,
        partition: str = "auto",
        unused: str = "zero",
        broadcast_buffers: bool = True,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = ZeroConfig(
            stage=stage,
            max_norm=max_norm,
            bucket_bytes=bucket_bytes,
            overlap_communication=overlap_communication,
            communication_dtype=communication_dtype,
            overlap_allgather=overlap_allgather,
            cpu_offload=cpu_offload,
            offload=offload,
            offload_dir=offload_dir,
            master_weights=master_weights,
            replica_size=replica_size,
            partition=partition,
            unused=unused,
            broadcast_buffers=broadcast_buffers,
        )
        self.precision = None if precision is None else PrecisionPolicy.parse(precision)
        self._ranks: tuple[Any, ShardingRanks] | None = None

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the policy with working parameters in the compute format, and masters beside them where it is narrow.

        Raises:
            ConfigError: If ``reduce_dtype`` and ``communication_dtype`` differ, or fp32 compute is to have masters.
        """
        wire = self.config.wire_dtype
        if wire is not None:
            if policy.reduce_dtype not in (torch.float32, wire):
                msg = (
                    f"`reduce_dtype={policy.reduce_dtype}` of the precision and `communication_dtype={wire}` of the "
                    "plugin are two answers to one question. Give one of them."
                )
                raise ConfigError(msg)
            policy = replace(policy, reduce_dtype=wire)
        if policy.compute_dtype not in NARROW:
            return check_no_masters(policy, self.name)
        masters = policy.master_dtype if self.config.master_weights else policy.compute_dtype
        return replace(policy, param_dtype=policy.compute_dtype, master_dtype=masters)

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Lay the trained parameters out in buckets, and let the optimizer update this rank's part of them.

        Raises:
            ConfigError: If ``replica_size`` does not divide the number of ranks, the optimizer or a parameter can't
                be sharded, or ``offload_dir`` is not a folder that can be written to.
            OffloadError: If ``offload_dir`` has no room for the masters and the state that there is.

        Collective: every rank of the world.
        """
        room = self._room(context)
        model = objects.model
        check_distinct_memory(model)
        place_model(model, objects.optimizer, context.device, replace(context.precision, param_dtype=None))
        agree_on_values(model)
        return self._shard(objects, context, self._ranks_of_world(), room)

    def shard(
        self,
        objects: Boosted,
        context: BoostContext,
        ranks: ShardingRanks,
        optimizer_class: type[ZeroOptimizer] = ZeroOptimizer,
        model_class: type[ZeroModel] = ZeroModel,
        copies: Mapping[int, tuple[int, ...]] | None = None,
    ) -> Boosted:
        """Shard a model that is on its device already, over ranks that were given the same values of it.

        For strategies that are composed with this one, and have ranks that hold other parts of the model.

        Args:
            objects: As for `configure`.
            context: As for `configure`.
            ranks: The ranks that share the state.
            optimizer_class: What steps the shards.
            model_class: What runs the model.
            copies: For parameters of which other places hold a copy, by ``id``: `Format.copies`.

        Raises:
            ConfigError: As for `configure`.
            OffloadError: As for `configure`.

        Collective: every rank of the world.
        """
        return self._shard(
            objects, context, ranks, self._room(context), optimizer_class, model_class=model_class, copies=copies
        )

    def _shard(
        self,
        objects: Boosted,
        context: BoostContext,
        ranks: ShardingRanks,
        room: Room,
        optimizer_class: type[ZeroOptimizer] = ZeroOptimizer,
        *,
        model_class: type[ZeroModel] = ZeroModel,
        copies: Mapping[int, tuple[int, ...]] | None = None,
    ) -> Boosted:
        model = objects.model
        format_of = self._formats(model, context, copies or {})
        optimizer = None
        if objects.optimizer is not None:
            optimizer = optimizer_class(
                objects.optimizer,
                model,
                config=self.config,
                ranks=ranks,
                format_of=format_of,
                room=room,
                precision=context.precision,
                after_step=context.after_step,
            )
            room.check_together("Nothing is lost: what found no room lies in RAM.")
        else:
            refuse_all_gradients(model)
        for parameter in model.parameters():  # those that the optimizer does not hold
            parameter.data = parameter.data.to(format_of(parameter).working)
        if self.config.overlap_allgather and optimizer is not None:
            optimizer.gathers.watch(model)
        wrapped = model_class(model, precision=context.precision, optimizer=optimizer)
        return objects._replace(model=wrapped, optimizer=optimizer)

    def state_adapter(self, model: nn.Module, optimizer: Optimizer | None, context: BoostContext) -> StateAdapter:
        """Return the view of parameters, masters and sharded optimizer state."""
        zero = optimizer if isinstance(optimizer, ZeroOptimizer) else None
        return ZeroStateAdapter(model, zero, context.coordinator)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Return a context in which stage 1 accumulates whole gradients here; stage 2 reduces each into its shard."""
        del model
        if self.config.stage == 1 and isinstance(optimizer, ZeroOptimizer):
            return _paused(optimizer)
        return contextlib.nullcontext()

    def full_gradient(self, model: nn.Module, optimizer: Optimizer | None, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter, averaged over ranks, put together from its shards."""
        parameter = unwrap_model(model).get_parameter(name)
        if isinstance(optimizer, ZeroOptimizer) and optimizer.holds(parameter):
            return optimizer.full_gradient(parameter)
        own = unscaled_gradient(parameter, optimizer)
        if not any(collectives.all_gather_object(own is not None)):
            return None
        whole = torch.zeros_like(parameter) if own is None else own.contiguous()
        collectives.all_reduce(whole).wait()
        return whole / dist.get_world_size()

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return asdict(self.config)

    def _ranks_of_world(self) -> ShardingRanks:
        """Return this rank's place; process groups are made once for each world."""
        world = dist.group.WORLD
        if self._ranks is None or self._ranks[0] is not world:
            self._ranks = (world, make_ranks(self.config.replica_size))
        return self._ranks[1]

    def _room(self, context: BoostContext) -> Room:
        """Return where the optimizer's tensors are to lie; a folder is tried out on every rank first."""
        if self.config.offload_dir is None:
            return Room()
        folder = MappedFolder(self.config.offload_dir, option="offload_dir")
        error: ConfigError | None = None
        try:
            folder.check()
        except ConfigError as caught:
            error = caught
        context.coordinator.raise_together(error, name="boost")
        return Room(folder)

    def _formats(
        self, model: nn.Module, context: BoostContext, copies: Mapping[int, tuple[int, ...]]
    ) -> Callable[[nn.Parameter], Format]:
        policy, device = context.precision, context.device
        working_dtype = working_dtypes(model, policy.param_dtype)
        asked = self.config.wire_dtype or (policy.reduce_dtype if policy.reduce_dtype != torch.float32 else None)

        def format_of(parameter: nn.Parameter) -> Format:
            working = working_dtype(parameter)
            narrow_with_master = working in NARROW and policy.param_dtype is not None
            return Format(
                working=working,
                master=policy.master_dtype if narrow_with_master else working,
                wire=asked or working,
                device=device,
                home=torch.device("cpu") if self.config.offloads else device,
                is_trained=parameter.requires_grad,
                copies=copies.get(id(parameter), ()),
            )

        return format_of


@contextlib.contextmanager
def _paused(optimizer: ZeroOptimizer) -> Iterator[None]:
    before, optimizer.reducer.is_paused = optimizer.reducer.is_paused, True
    try:
        yield
    finally:
        optimizer.reducer.is_paused = before
