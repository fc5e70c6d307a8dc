"""`TorchDDPPlugin`: ``torch.nn.parallel.DistributedDataParallel`` as a plugin of `Booster`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from booster_core.errors import ConfigError
from booster_core.plugin import (
    Boosted,
    Capability,
    GradientScaling,
    ModelWrapper,
    check_no_masters,
    like,
    place_model,
    unwrap_model,
    write_gradient,
)
from booster_ddp.config import BY_DTYPE, DDPConfig
from booster_ddp.model import DDPModel
from booster_ddp.optimizer import DDPOptimizer
from booster_runtime.sharding import note_reductions, refuse_composed, refuse_renormalized
from booster_runtime.strategy import STRATEGY_TRAINING, Strategy, config_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from booster_core.plugin import BoostContext
    from booster_core.precision import PrecisionPolicy
    from booster_runtime.lazy import Recording


class TorchDDPPlugin(Strategy):
    """Train a full replica of the model on every rank; gradients are averaged during backward.

    `DDPConfig` documents the keywords of the signature.

    Args:
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Memory per rank and step: parameters, gradients (twice unless ``gradient_as_bucket_view``), optimizer state.
    Communication per rank and step: one all-reduce of the gradients.
    Reference: Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704).
    """

    name: ClassVar[str] = "ddp"
    api_version: ClassVar[int] = 2
    capabilities: ClassVar[frozenset[Capability]] = STRATEGY_TRAINING | {
        Capability.DATA_PARALLEL,
        Capability.SEVERAL_OPTIMIZERS,
    }
    renamed_arguments: ClassVar[Mapping[str, str]] = {
        "check_reduction": "leave it out: an unfinished reduction raises",
        "fp8_communication": "pass `comm_hook=`, which compresses gradients in fp16, bf16, by PowerSGD or your own way",
    }

    def __init__(
        self,
        broadcast_buffers: bool = True,  # noqa: FBT001, FBT002 - positional as in the tutorials
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool | None = None,  # noqa: FBT001
        *,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        comm_hook: Any = None,
        comm_hook_state: object = None,
        sync_batchnorm: bool = False,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = config_of(DDPConfig, locals())
        self.precision = precision

    @classmethod
    def settings_to_plan(cls, world_size: int) -> list[dict[str, Any]]:
        """Return the settings that ``booster plan`` compares."""
        del world_size
        return [{}, {"gradient_as_bucket_view": True}]

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the policy; a ``reduce_dtype`` narrower than fp32 is implemented by a compression hook.

        Raises:
            ConfigError: If it needs masters, or its ``reduce_dtype`` has no hook or contradicts ``comm_hook``.
        """
        wanted = policy.reduce_dtype
        if wanted != torch.float32 and (
            wanted not in BY_DTYPE or self.config.comm_hook not in (None, BY_DTYPE[wanted])
        ):
            msg = (
                f"`reduce_dtype={wanted}` and `comm_hook={self.config.comm_hook!r}` contradict each other. "
                "Pass one of them; `reduce_dtype` may be torch.float32, torch.bfloat16 or torch.float16."
            )
            raise ConfigError(msg)
        return check_no_masters(policy, self.name)

    def check_model(self, objects: Boosted, context: BoostContext) -> None:
        """Refuse a model whose replicas would differ, and BatchNorm layers that can't be replaced."""
        model = objects.model
        if context.coordinator.world_size > 1:
            refuse_renormalized(model)
            refuse_composed(model)
        if self.config.sync_batchnorm:
            check_sync_batchnorm(model)

    def shard(self, objects: Boosted, context: BoostContext, values: Recording | None) -> Boosted:
        """Move the model to the device, wrap it by DDP, and wrap the optimizers.

        Collective: every rank of the world.
        """
        del values
        original = objects.model
        place_model(original, objects.optimizers, context.device, context.precision)
        if self.config.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(original)  # type: ignore[no-untyped-call]
        model = DDPModel(original, self.config, context, has_optimizer=bool(objects.optimizers))
        if model.sends_gradients:
            formats = {model.communication_dtype or each.dtype for each in model.gradients.trained.values()}
            note_reductions(original, formats, context.device, by_backend=True)
        scaling = GradientScaling(context.precision)
        optimizers = [
            DDPOptimizer(each, model.gradients, context=context, scaling=scaling) for each in objects.optimizers
        ]
        return objects._replace(model=model, optimizer=like(objects.optimizer, optimizers))

    def no_sync(self, model: ModelWrapper) -> AbstractContextManager[None]:
        """Return a context in which forward and backward don't communicate, as DDP's own ``no_sync``.

        A model that was boosted without its optimizer communicates nevertheless: no optimizer of ours would average the
        gradients that are left.
        """
        if isinstance(model, DDPModel) and model.boosted_optimizers:
            return model.no_sync()
        return super().no_sync(model)

    def full_gradient(self, model: ModelWrapper, name: str) -> Tensor | None:
        """Return a parameter's gradient, averaged over all ranks."""
        optimizer = _optimizer_of(model)
        if optimizer is not None:
            optimizer.settle()
        return super().full_gradient(model, name)

    def set_full_gradient(self, model: ModelWrapper, name: str, values: Tensor) -> None:
        """Replace a parameter's gradient, which `full_gradient` has returned just before, by the same on every rank."""
        gradient = unwrap_model(model).get_parameter(name).grad
        assert gradient is not None, "`full_gradient` has returned it"
        write_gradient(gradient, values, model.boosted_optimizers)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return {field.name: getattr(self.config, field.name) for field in fields(self.config)}


def check_sync_batchnorm(model: nn.Module) -> None:
    """Check that torch can replace the BatchNorm layers inside a model by its ``SyncBatchNorm``.

    Raises:
        ConfigError: If a layer overrides ``forward``, which the replacement would not run, or is the model itself.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
    if "" in layers:
        msg = (
            f"`sync_batchnorm=True` replaces layers inside a model; the model is a `{type(model).__name__}` itself. "
            "Put it into an `nn.Sequential`, or leave the option out."
        )
        raise ConfigError(msg)
    special = [f"'{name}' ({type(each).__name__})" for name, each in layers.items() if _has_own_forward(each)]
    if special:
        msg = (
            f"`sync_batchnorm=True` would drop the forward of {len(special)} BatchNorm layer(s) whose class defines "
            f"one: {', '.join(special[:10])}. Leave the option out and convert them before `boost` by a function that "
            "knows their class, such as `timm.layers.convert_sync_batchnorm`."
        )
        raise ConfigError(msg)


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether a layer's class, or the layer itself, overrides the forward of BatchNorm."""
    return type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward) or "forward" in vars(module)


def _optimizer_of(model: ModelWrapper) -> DDPOptimizer | None:
    """Return an optimizer of a boosted model, of which any settles the gradients of all; ``None`` where it has none."""
    return next((each for each in model.boosted_optimizers if isinstance(each, DDPOptimizer)), None)
