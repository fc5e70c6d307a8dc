"""`TorchDDPPlugin`: ``torch.nn.parallel.DistributedDataParallel`` behind `Booster`; torch does the work."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import Boosted, Capability, Plugin
from booster_core.replicated import check_no_masters, place_model
from booster_core.wrappers import ModelWrapper, OptimizerWrapper
from booster_ddp.comm_hooks import BY_DTYPE, register_comm_hook
from booster_ddp.config import DDPConfig
from booster_ddp.sync_batchnorm import convert_sync_batchnorm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext
    from booster_core.precision import PrecisionPolicy


class TorchDDPPlugin(Plugin):
    """Data parallelism with the whole model on every rank: gradients are averaged as backward produces them.

    Args:
        broadcast_buffers: See `DDPConfig`, which documents this and the following options.
        bucket_cap_mb: Bucket size in MiB.
        find_unused_parameters: Look for unused parameters; ``None`` does unless ``static_graph`` is set.
        check_reduction: Without effect in torch; ``True`` raises.
        gradient_as_bucket_view: Gradients are views of the buckets.
        static_graph: Each step uses the same parameters in the same way.
        comm_hook: Gradient compression, by name or as a function.
        comm_hook_state: State of the hook.
        sync_batchnorm: Global batch statistics in BatchNorm layers.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Memory per rank and step: parameters, gradients (twice unless ``gradient_as_bucket_view``), optimizer state.
    Communication per rank and step: one all-reduce of the gradients.
    Reference: Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704).
    """

    name: ClassVar[str] = "ddp"
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
        broadcast_buffers: bool = True,  # noqa: FBT001, FBT002 - positional as in the tutorials
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool | None = None,  # noqa: FBT001
        check_reduction: bool = False,  # noqa: FBT001, FBT002
        gradient_as_bucket_view: bool = False,  # noqa: FBT001, FBT002
        static_graph: bool = False,  # noqa: FBT001, FBT002
        *,
        comm_hook: Any = None,
        comm_hook_state: object = None,
        sync_batchnorm: bool = False,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = DDPConfig(
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            comm_hook=comm_hook,
            comm_hook_state=comm_hook_state,
            sync_batchnorm=sync_batchnorm,
        )
        self.precision = precision

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the policy; a ``reduce_dtype`` narrower than fp32 is brought about by a compression hook.

        Raises:
            ConfigError: If it needs masters, or its ``reduce_dtype`` contradicts ``comm_hook`` or has no hook.
        """
        wanted = policy.reduce_dtype
        if wanted != torch.float32 and (
            wanted not in BY_DTYPE or self.config.comm_hook not in (None, BY_DTYPE[wanted])
        ):
            msg = (
                f"`reduce_dtype={wanted}` and `comm_hook={self.config.comm_hook!r}` can't both be had under DDP. "
                "Give one of them; `reduce_dtype` may be torch.float32, torch.bfloat16 or torch.float16."
            )
            raise ConfigError(msg)
        return check_no_masters(policy, self.name)

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Move the model to the device, wrap it by DDP, and wrap the optimizer.

        Collective: every rank of the world.
        """
        original = objects.model
        place_model(original, objects.optimizer, context.device, context.precision)
        if self.config.sync_batchnorm:
            convert_sync_batchnorm(original)
        trained = [parameter for parameter in original.parameters() if parameter.requires_grad]
        # DDP refuses a model without gradients; a frozen teacher needs nothing of it.
        inner = self._wrap(original, context) if trained else original
        model = ModelWrapper(inner, original, precision=context.precision)
        optimizer = objects.optimizer and DDPOptimizer(
            objects.optimizer, original, precision=context.precision, after_step=context.after_step
        )
        return objects._replace(model=model, optimizer=optimizer)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Return DDP's own ``no_sync``: forward and backward inside it don't communicate."""
        inner = model.module
        if isinstance(inner, DistributedDataParallel):
            return inner.no_sync()
        return super().no_sync(model, optimizer)

    def describe(self) -> Mapping[str, object]:
        """Return DDP's options and their values."""
        return asdict(self.config)

    def _wrap(self, model: nn.Module, context: BoostContext) -> DistributedDataParallel:
        config = self.config
        options: dict[str, Any] = {} if config.broadcast_buffers else {"broadcast_buffers": False}
        with warnings.catch_warnings():
            # torch 2.13 announces another option of nearly the same meaning; only this one exists since 2.10, and
            # only it leaves rank-local buffers alone at the start too.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            ddp = DistributedDataParallel(
                model,
                device_ids=[context.device] if context.device.type == "cuda" else None,
                bucket_cap_mb=config.bucket_cap_mb,
                find_unused_parameters=config.finds_unused_parameters,
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                **options,
            )
        hook = config.comm_hook or BY_DTYPE.get(context.precision.reduce_dtype)
        if hook is not None:
            register_comm_hook(ddp, hook, config.comm_hook_state)
        return ddp


class DDPOptimizer(OptimizerWrapper):
    """An optimizer that refuses gradients which DDP has not averaged.

    Args:
        optim: The optimizer inside.
        model: The user's model; parameters frozen now stay out of DDP's reduction for good.
        **kwargs: As for `OptimizerWrapper`.
    """

    def __init__(self, optim: Optimizer, model: nn.Module, **kwargs: Any) -> None:
        super().__init__(optim, **kwargs)
        self._unreduced = {
            name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad
        }

    def gradients(self) -> list[Tensor]:
        """Return this rank's gradients.

        Raises:
            GradientError: If a parameter that was frozen at ``boost`` has one: no other rank knows of it.
        """
        self._check_reduced()
        return super().gradients()

    def step(self, closure: Any = None) -> Any:
        """Update the parameters; see `OptimizerWrapper.step`.

        Raises:
            GradientError: If a parameter that was frozen at ``boost`` has a gradient.

        Collective: none; every rank must step alike.
        """
        self._check_reduced()
        return super().step(closure)

    def _check_reduced(self) -> None:
        unreduced = [name for name, parameter in self._unreduced.items() if parameter.grad is not None]
        if unreduced:
            msg = (
                f"{len(unreduced)} parameter(s) that were frozen when `boost` was called have gradients now, which DDP "
                f"does not average: {', '.join(map(repr, unreduced[:10]))}. Unfreeze them before `boost`."
            )
            raise GradientError(msg)
