"""`TorchDDPPlugin`: ``torch.nn.parallel.DistributedDataParallel`` as a plugin of `Booster`."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import (
    Boosted,
    Capability,
    GradientScaling,
    ModelWrapper,
    OptimizerWrapper,
    check_no_masters,
    like,
    place_model,
    unwrap_model,
    write_gradient,
)
from booster_core.state import ReplicatedStateAdapter
from booster_ddp.buffers import DistributedDataParallel
from booster_ddp.comm_hooks import BY_DTYPE, register_comm_hook
from booster_ddp.config import DDPConfig
from booster_ddp.first_step import FirstStep
from booster_ddp.model import DDPModel
from booster_ddp.names import with_users_names
from booster_ddp.rank_local import RankLocal
from booster_ddp.sync_batchnorm import convert_sync_batchnorm
from booster_ddp.unreduced import UnreducedGradients
from booster_runtime.sharding import note_reductions, refuse_renormalized
from booster_runtime.strategy import STRATEGY_TRAINING, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext
    from booster_core.precision import PrecisionPolicy
    from booster_core.state import StateAdapter
    from booster_runtime.strategy import Values

_DEFAULT_BUCKET_CAP_MB = 25  # torch's


class TorchDDPPlugin(Strategy):
    """Train a full replica of the model on every rank; gradients are averaged during backward.

    Args:
        broadcast_buffers: See `DDPConfig`, which documents this and the following options.
        bucket_cap_mb: Bucket size in MiB.
        find_unused_parameters: Search for unused parameters; ``None`` decides in the first step.
        check_reduction: No effect in torch; ``True`` raises.
        gradient_as_bucket_view: Make gradients views of the buckets.
        static_graph: Declare that each step uses the same parameters in the same way.
        comm_hook: Gradient compression hook, by name or as a function.
        comm_hook_state: State of the hook.
        sync_batchnorm: Use the global batch's statistics in BatchNorm layers.
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

    def __init__(
        self,
        broadcast_buffers: bool = True,  # noqa: FBT001, FBT002 - positional as in the tutorials
        bucket_cap_mb: float | None = None,
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
        """Refuse an embedding that changes its table in forward, so that replicas would differ."""
        if context.coordinator.world_size > 1:
            refuse_renormalized(objects.model)

    def shard(self, objects: Boosted, context: BoostContext, values: Values | None) -> Boosted:
        """Move the model to the device, wrap it by DDP, and wrap the optimizers.

        Collective: every rank of the world.
        """
        del values
        original = objects.model
        place_model(original, objects.optimizers, context.device, context.precision)
        if self.config.sync_batchnorm:
            convert_sync_batchnorm(original, context.device.type)
        rank_local = RankLocal.of(original)
        is_reduced = any(p.requires_grad and p not in rank_local for p in original.parameters())
        model = DDPModel(original, precision=context.precision)
        asked = False if self.config.static_graph else self.config.find_unused_parameters
        bucket_bytes = int((self.config.bucket_cap_mb or _DEFAULT_BUCKET_CAP_MB) * 2**20)
        has_optimizer = bool(objects.optimizers)
        hook = self.config.comm_hook or BY_DTYPE.get(context.precision.reduce_dtype)
        narrow = next((dtype for dtype, name in BY_DTYPE.items() if name == hook), None)
        unreduced = UnreducedGradients(
            model, context, bucket_bytes=bucket_bytes, rank_local=rank_local, wire=narrow, can_wait=has_optimizer
        )

        def wrap(find_unused_parameters: bool) -> DistributedDataParallel:  # noqa: FBT001 - DDP's own option
            with rank_local.known_to_ddp(original):
                ddp = self._wrap(original, context, find_unused_parameters)
            unreduced.follow(ddp)
            return with_users_names(ddp)

        if hook in (None, "allreduce") or narrow is not None:  # others send something else than gradients
            averaged = [each for each in original.parameters() if each.requires_grad and each not in rank_local]
            note_reductions(original, {narrow or each.dtype for each in averaged}, context.device, by_backend=True)
        # DDP refuses a model without trainable parameters, such as a frozen teacher.
        if is_reduced and asked is None and has_optimizer:
            unreduced.first_step = FirstStep(
                model,
                wrap,
                bucket_bytes=bucket_bytes,
                rank_local=rank_local,
                broadcast_buffers=self.config.broadcast_buffers,
            )
        elif is_reduced:
            model.module = wrap(asked is not False)
        scaling = GradientScaling(context.precision)
        optimizers = [
            DDPOptimizer(each, model, unreduced, rank_local, context=context, scaling=scaling)
            for each in objects.optimizers
        ]
        return objects._replace(model=model, optimizer=like(objects.optimizer, optimizers))

    def no_sync(self, model: ModelWrapper) -> AbstractContextManager[None]:
        """Return DDP's own ``no_sync``: forward and backward inside it don't communicate.

        A model that was boosted without its optimizer communicates nevertheless: no optimizer of ours would average the
        gradients that are left.
        """
        inner = model.module
        optimizer = _optimizer_of(model)
        if optimizer is None:
            return super().no_sync(model)
        if isinstance(inner, DistributedDataParallel):
            return inner.no_sync()
        if optimizer.first_step is not None:
            return optimizer.first_step.no_sync()
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

    def state_adapter(self, model: nn.Module, context: BoostContext) -> StateAdapter:
        """Return the view of the state that checkpoints are written against; ignored parameters are rank 0's."""
        ignored = RankLocal.of(model.unwrap() if isinstance(model, ModelWrapper) else model).names
        optimizers = model.boosted_optimizers if isinstance(model, ModelWrapper) else ()
        return ReplicatedStateAdapter(model, optimizers, context.coordinator, of_first=ignored)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return {field.name: getattr(self.config, field.name) for field in fields(self.config)}

    def _wrap(
        self,
        model: nn.Module,
        context: BoostContext,
        find_unused_parameters: bool,  # noqa: FBT001 - DDP's own option
    ) -> DistributedDataParallel:
        config = self.config
        options: dict[str, Any] = {} if config.broadcast_buffers else {"broadcast_buffers": False}
        with warnings.catch_warnings():
            # torch 2.13 deprecates this option in favor of `forward_sync_buffers`, which torch 2.10 does not have, and
            # which still broadcasts rank-local buffers at the start.
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


def _optimizer_of(model: ModelWrapper) -> DDPOptimizer | None:
    """Return an optimizer of a boosted model, of which any settles the gradients of all; ``None`` where it has none."""
    return next((each for each in model.boosted_optimizers if isinstance(each, DDPOptimizer)), None)


class DDPOptimizer(OptimizerWrapper):
    """Step only with gradients that are averaged over all ranks.

    Args:
        optim: The optimizer inside.
        model: The boosted model; DDP will never reduce parameters that are frozen now.
        unreduced: Tracks gradients that DDP has not averaged, and the first step; the model's, for all its optimizers.
        rank_local: Parameters that are not averaged.
        **kwargs: As for `OptimizerWrapper`.
    """

    def __init__(
        self,
        optim: Optimizer,
        model: ModelWrapper,
        unreduced: UnreducedGradients,
        rank_local: RankLocal,
        **kwargs: Any,
    ) -> None:
        super().__init__(optim, **kwargs)
        self._unreduced = unreduced
        self._model = model
        named = dict(model.unwrap().named_parameters())
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._reduced = {name: parameter for name, parameter in trained.items() if parameter not in rank_local}
        self._ignored = {name: parameter for name, parameter in trained.items() if parameter in rank_local}

    @property
    def first_step(self) -> FirstStep | None:
        """The first step, as long as it decides on ``find_unused_parameters``."""
        return self._unreduced.first_step

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss; see `OptimizerWrapper.backward`.

        Raises:
            GradientError: If DDP has averaged some of the gradients already, and this backward adds to them.

        Collective: every rank of the world, in step, outside of ``no_sync``.
        """
        try:
            super().backward(loss, inputs, retain_graph=retain_graph)
        except RuntimeError as cause:
            if "gradient which is undefined, but still allreduced" in str(cause):
                msg = (
                    "Some gradients of backward under `no_sync` were dropped and others kept, so that DDP can't tell "
                    "which parameters this step uses. Drop all of them, by `optimizer.zero_grad()` or "
                    "`model.zero_grad()`."
                )
                raise GradientError(msg) from cause
            if "mark a variable ready only once" not in str(cause):
                raise
            msg = (
                "DDP can't average this backward together with the previous one: both use some of the parameters, and "
                "each leaves others unused. Run all forward and backward passes of the step under `booster.no_sync`; "
                "`optimizer.step()` then averages the gradients."
            )
            raise GradientError(msg) from cause
        if self.first_step is not None and not self.first_step.is_accumulating:
            self._average()

    def check_inputs(self, inputs: tuple[Any, ...]) -> None:
        """Check that DDP's reducer can finish with the gradients of some tensors only.

        Raises:
            ConfigError: If it waits for those of other parameters too.
        """
        super().check_inputs(inputs)
        ids = {id(each) for each in inputs}
        num_inputs = sum(id(parameter) in ids for parameter in self._reduced.values())
        if not self._unreduced.can_finish(num_inputs, len(self._reduced)):
            msg = (
                f"`inputs` has {num_inputs} of the {len(self._reduced)} parameters that DDP averages together, and it "
                "would wait for the others. Leave `inputs` out, or run this forward and backward under "
                "`booster.no_sync`; `optimizer.step()` then averages the gradients."
            )
            raise ConfigError(msg)

    def settle(self) -> None:
        """Average gradients that DDP has not: those of ``no_sync``, or of a second backward through one forward.

        Raises:
            GradientError: If DDP has averaged only some of the gradients, or a frozen parameter has one.

        Collective: every rank of the world if there are such gradients; else none.
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

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip the unscaled gradients by their global norm.

        Raises:
            ConfigError: If DDP ignores a trained parameter: the norm would differ between ranks.
        """
        if self._ignored:
            msg = (
                "The norm of the gradients differs between ranks, because DDP ignores "
                f"{', '.join(map(repr, [*self._ignored][:10]))}. Use `clip_grad_by_value`, or clip the parameters that "
                "DDP averages by `torch.nn.utils.clip_grad_norm_`."
            )
            raise ConfigError(msg)
        return super().clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def overflow_anywhere(self, overflow: bool) -> bool:  # noqa: FBT001 - a flag is all there is to pass
        """Return whether a gradient overflowed on any rank; those that DDP ignores may do so on one alone.

        Collective: every rank of the world, if DDP ignores a trained parameter; else none.
        """
        if not self._ignored:
            return overflow
        found = torch.tensor(int(overflow), device=next(iter(self._ignored.values())).device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters; see `OptimizerWrapper.step`.

        Raises:
            GradientError: If a parameter has a gradient that can't be averaged.

        Collective: as `settle`; every rank must call it.
        """
        if closure is None:
            self.settle()
        result = super().step(closure)
        if self.first_step is not None and any(p.grad is not None for p in self._reduced.values()):
            self.first_step.finish()
            self._unreduced.first_step = None
        return result

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the inner optimizer; with a closure, average the gradients after each call of it."""
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
                f"{len(unreduced)} parameter(s) that were frozen when `boost` was called have gradients, which DDP "
                f"does not average: {', '.join(map(repr, unreduced[:10]))}. Unfreeze them before `boost`."
            )
            raise GradientError(msg)
