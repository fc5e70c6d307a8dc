"""`TorchFSDPPlugin`: ``torch.distributed.fsdp.fully_shard`` as a plugin of `Booster`.

Parameters are sharded over the ranks. A unit's parameters are gathered right before its forward and backward and
resharded afterwards, and its gradients are reduce-scattered when its backward ends (Zhao et al. 2023, "PyTorch FSDP",
arXiv:2304.11277). torch implements this; the plugin chooses the units, adapts the user's optimizer, and provides the
state for checkpoints.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from booster_core.errors import ConfigError
from booster_core.plugin import (
    Boosted,
    Capability,
    GradientScaling,
    like,
    place_model,
    write_gradient,
)
from booster_core.precision import PrecisionPolicy
from booster_core.state import slices_of
from booster_fsdp.config import FSDPConfig
from booster_fsdp.gradients import ShardedGradients
from booster_fsdp.model import FSDPModel
from booster_fsdp.optimizer import FSDPOptimizer, FSDPStateAdapter
from booster_fsdp.sharding import (
    check_parameters,
    fill_model,
    hollow_model,
    make_mesh,
    ranks_of,
    replace_parameters,
    shard_model,
)
from booster_fsdp.units import resolve_formats, uses_autocast
from booster_runtime.lazy import is_lazy, shards_from_host
from booster_runtime.model_methods import mark_as_local
from booster_runtime.sharding import agree_on_values, dtensor_shards, refuse_all_gradients, without_optimizer
from booster_runtime.strategy import OF_PRECISION, STRATEGY_TRAINING, Strategy, config_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from booster_core.plugin import BoostContext, ModelWrapper
    from booster_core.state import StateAdapter
    from booster_runtime.lazy import Recording


class TorchFSDPPlugin(Strategy):
    """Shard parameters, gradients and optimizer state over all ranks by torch's FSDP2.

    `FSDPConfig` documents the keywords of the signature.

    Args:
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Memory per rank and step, for N ranks: 1/N of parameters, gradients and optimizer state; the gathered parameters and
    gradients of one or two units.
    Communication per rank and step: two all-gathers of the parameters and one reduce-scatter of the gradients.
    Reference: Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277).
    """

    name: ClassVar[str] = "fsdp"
    api_version: ClassVar[int] = 2
    placeholders: ClassVar[Literal["device", "own"] | None] = "own"
    capabilities: ClassVar[frozenset[Capability]] = STRATEGY_TRAINING | {
        Capability.DATA_PARALLEL,
        Capability.SEVERAL_OPTIMIZERS,
    }
    renamed_arguments: ClassVar[Mapping[str, str]] = {
        "process_group": "pass `replica_size=`, the number of replicas of the sharded model",
        "sharding_strategy": (
            "`FULL_SHARD` is the default, `SHARD_GRAD_OP` is `reshard_after_forward=False`, `HYBRID_SHARD` is "
            "`replica_size=`, and `NO_SHARD` is plugin 'ddp'"
        ),
        "auto_wrap_policy": "pass `unit_classes=`, `unit_min_numel=` or `unit_if=`; by default units are layers",
        "param_init_fn": "build the model in `with LazyInitContext():`",
        "sync_module_states": "leave it out: all ranks begin with the first one's values",
        "fp8_communication": OF_PRECISION["fp8_communication"],
        "mesh": "it is made of all ranks; `replica_size=2` shards the model within halves of them",
        "offload_policy": "pass `cpu_offload=True`, which offloads to pinned memory where there is a device",
        "autocast": "`mixed_precision=MixedPrecisionPolicy(...)` of `torch.distributed.fsdp` runs forward without it",
    }

    def __init__(
        self,
        *,
        reshard_after_forward: bool | int = True,
        unit_classes: Sequence[str] = (),
        unit_min_numel: int | None = None,
        unit_if: Callable[[str, nn.Module], bool] | None = None,
        ignored_modules: Sequence[str] = (),
        ignored_parameters: Sequence[str] = (),
        replica_size: int = 1,
        shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        max_norm: float = 0.0,
        partition: str = "auto",
        broadcast_buffers: bool = True,
        forward_methods: Sequence[str] | None = None,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = config_of(FSDPConfig, locals())
        self.precision = None if precision is None else PrecisionPolicy.parse(precision)
        if self.precision is not None:
            self.resolve_precision(self.precision)
        self._mesh: tuple[Any, DeviceMesh] | None = None

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the precision of a run, with the dtypes of ``mixed_precision``.

        Raises:
            ConfigError: If the policy asks for masters in another dtype than the parameters, or for other dtypes than
                ``mixed_precision``.
        """
        return resolve_formats(self.config, super().resolve_precision(policy))

    @classmethod
    def settings_to_plan(cls, world_size: int) -> list[dict[str, Any]]:
        """Return the settings that ``booster plan`` compares."""
        del world_size
        return [{}, {"reshard_after_forward": False}]

    def offloading(self) -> str | None:
        """Return the option that offloads, if any; ``booster plan`` can't tell device and host memory apart."""
        return "cpu_offload=True" if self.config.cpu_offload else None

    def shard(self, objects: Boosted, context: BoostContext, values: Recording | None) -> Boosted:
        """Shard the model, and let the optimizer update this rank's shards.

        Raises:
            ConfigError: If ``replica_size`` does not divide the number of ranks, a name in the options is not in the
                model, or the model or optimizer can't be sharded.
            LazyInitError: If a lazy model can't be filled on some rank.

        Collective: every rank of the world.
        """
        del values
        mesh = self._mesh_of_world(context)
        model, given = objects.model, objects.optimizers
        methods = self._forward_methods(model)
        check_parameters(model)
        recording = None
        if is_lazy(model) or shards_from_host(context):
            recording = hollow_model(model, given, context.device, context.precision)
        else:
            place_model(model, given, context.device, context.precision)
            agree_on_values(model)
        if not given:
            refuse_all_gradients(model)  # of parameters that stay replicated
        before = {parameter: path for path, parameter in model.named_parameters()}
        units = shard_model(model, mesh, self.config, context.precision)
        if recording is not None:
            fill_model(
                model,
                recording,
                units.values(),
                context.device,
                context.precision,
                offload=self.config.cpu_offload,
            )
        writes = replace_parameters(model, units.values(), before)
        for method in methods:
            register_fsdp_forward_method(model, method)
        mark_as_local(model)
        gradients = ShardedGradients(
            model,
            units,
            context.device,
            broadcast_buffers=self.config.broadcast_buffers,
            writes=writes,
            refuse=None if given else without_optimizer,
        )
        cast_by = context.precision if uses_autocast(self.config, context.precision) else None
        wrapped = FSDPModel(model, gradients=gradients, precision=cast_by, forward_methods=methods)
        scaling = GradientScaling(context.precision)
        optimizers = [
            FSDPOptimizer(
                each,
                model,
                before=before,
                gradients=gradients,
                ranks=ranks_of(mesh),
                config=self.config,
                device=context.device,
                context=context,
                scaling=scaling,
            )
            for each in given
        ]
        if recording is not None:
            for optimizer in optimizers:
                optimizer.views.move_state()
        return objects._replace(model=wrapped, optimizer=like(objects.optimizer, optimizers))

    def state_adapter(self, model: ModelWrapper, context: BoostContext) -> StateAdapter:
        """Return the view of sharded parameters and optimizer state."""
        return FSDPStateAdapter(model, _optimizers_of(model), context.coordinator, cast("FSDPModel", model).gradients)

    def no_sync(self, model: ModelWrapper) -> AbstractContextManager[None]:
        """Return a context in which unsharded gradients accumulate here, in as much memory as the whole model."""
        return cast("FSDPModel", model).gradients.without_reduction()

    def full_gradient(self, model: ModelWrapper, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter, averaged over ranks and gathered from its shards."""
        optimizers = _optimizers_of(model)
        if not optimizers:  # whose gradients raise in backward
            return None
        parameter = cast("FSDPModel", model).gradients.parameters[name]
        holder = next((each for each in optimizers if id(parameter) in each.listed_parameters()), optimizers[0])
        return holder.full_gradient(parameter)

    def set_full_gradient(self, model: ModelWrapper, name: str, values: Tensor) -> None:
        """Replace this rank's part of a parameter's gradient, which `full_gradient` has returned just before."""
        optimizers = model.boosted_optimizers
        gradient = cast("FSDPModel", model).gradients.parameters[name].grad
        assert gradient is not None, "`full_gradient` has returned it"
        if not isinstance(gradient, DTensor):
            write_gradient(gradient, values, optimizers)
            return
        for shard in dtensor_shards(name, None, gradient):
            write_gradient(shard.data, values[slices_of(shard.box)], optimizers)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return {field.name: getattr(self.config, field.name) for field in fields(self.config)}

    def _mesh_of_world(self, context: BoostContext) -> DeviceMesh:
        """Return the mesh; its process groups are created once for each default process group."""
        world = dist.group.WORLD
        if self._mesh is None or self._mesh[0] is not world:
            mesh = make_mesh(context.coordinator.world_size, context.device.type, self.config)
            self._mesh = (world, mesh)
        return self._mesh[1]

    def _forward_methods(self, model: nn.Module) -> tuple[str, ...]:
        asked = self.config.forward_methods
        if asked is None:
            return ("generate",) if callable(getattr(model, "generate", None)) else ()
        for name in asked:
            if not callable(getattr(model, name, None)):
                msg = f"`forward_methods` names '{name}', which {type(model).__name__} does not have."
                raise ConfigError(msg)
        return asked


def _optimizers_of(model: ModelWrapper) -> tuple[FSDPOptimizer, ...]:
    return tuple(each for each in model.boosted_optimizers if isinstance(each, FSDPOptimizer))
