"""`TorchDDPPlugin`: ``torch.nn.parallel.DistributedDataParallel`` behind `Booster`; torch does the work."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import (
    Boosted,
    Capability,
    ModelWrapper,
    OptimizerWrapper,
    Plugin,
    check_no_masters,
    place_model,
)
from booster_ddp.comm_hooks import BY_DTYPE, register_comm_hook
from booster_ddp.config import DDPConfig
from booster_ddp.first_step import FirstStep
from booster_ddp.sync_batchnorm import convert_sync_batchnorm
from booster_ddp.unreduced import UnreducedGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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
        find_unused_parameters: Look for unused parameters; ``None`` does where the first step finds some.
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
            convert_sync_batchnorm(original, context.device.type)
        trained = [parameter for parameter in original.parameters() if parameter.requires_grad]
        model = ModelWrapper(original, precision=context.precision)
        asked = False if self.config.static_graph else self.config.find_unused_parameters
        bucket_bytes = int(self.config.bucket_cap_mb * 2**20)
        has_optimizer = objects.optimizer is not None
        unreduced = UnreducedGradients(model, context, bucket_bytes=bucket_bytes, can_wait=has_optimizer)

        def wrap(find_unused_parameters: bool) -> DistributedDataParallel:  # noqa: FBT001 - DDP's own option
            ddp = self._wrap(original, context, find_unused_parameters)
            unreduced.follow(ddp)
            return ddp

        first_step = None
        # DDP refuses a model without gradients; a frozen teacher needs nothing of it.
        if trained and asked is None and has_optimizer:
            first_step = FirstStep(model, wrap)
        elif trained:
            model.module = wrap(asked is not False)
        optimizer = objects.optimizer and DDPOptimizer(
            objects.optimizer, model, first_step, unreduced, precision=context.precision, after_step=context.after_step
        )
        return objects._replace(model=model, optimizer=optimizer)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Return DDP's own ``no_sync``: forward and backward inside it don't communicate.

        A model that was boosted without its optimizer communicates all the same: a step of another optimizer would not
        know what is left to be averaged.
        """
        inner = model.module
        if not isinstance(optimizer, DDPOptimizer):
            return super().no_sync(model, optimizer)
        if isinstance(inner, DistributedDataParallel):
            return inner.no_sync()
        if optimizer.first_step is not None:
            return optimizer.first_step.no_sync()
        return super().no_sync(model, optimizer)

    def full_gradient(self, model: nn.Module, optimizer: Optimizer | None, name: str) -> Tensor | None:
        """Return a parameter's gradient, averaged over all ranks."""
        if isinstance(optimizer, DDPOptimizer):
            optimizer.settle()
        return super().full_gradient(model, optimizer, name)

    def describe(self) -> Mapping[str, object]:
        """Return DDP's options and their values."""
        return asdict(self.config)

    def _wrap(
        self,
        model: nn.Module,
        context: BoostContext,
        find_unused_parameters: bool,  # noqa: FBT001 - DDP's own option
    ) -> DistributedDataParallel:
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
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                **options,
            )
        hook = config.comm_hook or BY_DTYPE.get(context.precision.reduce_dtype)
        if hook is not None:
            register_comm_hook(ddp, hook, config.comm_hook_state)
        return ddp


class DDPOptimizer(OptimizerWrapper):
    """An optimizer that steps with gradients that are averaged over all ranks, or not at all.

    Args:
        optim: The optimizer inside.
        model: The boosted model; parameters frozen now stay out of DDP's reduction for good.
        first_step: The first step, where it has to find out about unused parameters.
        unreduced: The model's gradients that DDP does not average.
        **kwargs: As for `OptimizerWrapper`.
    """

    def __init__(
        self,
        optim: Optimizer,
        model: ModelWrapper,
        first_step: FirstStep | None,
        unreduced: UnreducedGradients,
        **kwargs: Any,
    ) -> None:
        super().__init__(optim, **kwargs)
        self.first_step = first_step
        self._unreduced = unreduced
        self._model = model
        named = dict(model.unwrap().named_parameters())
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        self._trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss; see `OptimizerWrapper.backward`.

        Raises:
            GradientError: If DDP has averaged only a part of the gradients, and this backward adds to that part.

        Collective: every rank of the world, in step, outside of ``no_sync``.
        """
        try:
            super().backward(loss, inputs, retain_graph=retain_graph)
        except RuntimeError as cause:
            if "mark a variable ready only once" not in str(cause):
                raise
            msg = (
                "DDP can't average this backward together with the one before, because both go through some "
                "parameters and each leaves out others. Run all backward passes of the step under `booster.no_sync`, "
                "forward included: the step averages."
            )
            raise GradientError(msg) from cause
        if self.first_step is not None and not self.first_step.is_accumulating:
            self._average()

    def settle(self) -> None:
        """Average what DDP has not averaged: gradients of ``no_sync``, or of a second backward through one forward.

        Raises:
            GradientError: If DDP has averaged only a part of the gradients, or a frozen parameter has one.

        Collective: every rank of the world, where there are such gradients; else none.
        """
        self._unreduced.check_finished()
        self._average()
        self._check_frozen()

    def gradients(self) -> list[Tensor]:
        """Return the gradients, averaged over all ranks.

        Raises:
            GradientError: If a parameter has one that can't be averaged.

        Collective: as `settle`.
        """
        self.settle()
        return super().gradients()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters; see `OptimizerWrapper.step`.

        Raises:
            GradientError: If a parameter has a gradient that can't be averaged.

        Collective: as `settle`; every rank must step alike.
        """
        if closure is None:
            self.settle()
        result = super().step(closure)
        if self.first_step is not None and any(p.grad is not None for p in self._trained.values()):
            self.first_step.finish()
            self.first_step = None
        return result

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside, with gradients that are averaged each time the closure has run backward."""
        if closure is None:
            return super().update_parameters()

        def evaluated() -> float:
            loss = closure()
            self.settle()
            return loss

        return super().update_parameters(evaluated)

    def _average(self) -> None:
        if not self._unreduced.exist:
            return
        counts = self._unreduced.average()
        if self.first_step is not None:
            self.first_step.note_users(counts)

    def _check_frozen(self) -> None:
        unreduced = [name for name, parameter in self._frozen.items() if parameter.grad is not None]
        if unreduced:
            msg = (
                f"{len(unreduced)} parameter(s) that were frozen when `boost` was called have gradients now, which DDP "
                f"does not average: {', '.join(map(repr, unreduced[:10]))}. Unfreeze them before `boost`."
            )
            raise GradientError(msg)
