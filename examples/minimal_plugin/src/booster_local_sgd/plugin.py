"""`LocalSGDPlugin`: every rank steps independently, and all ranks average their parameters every few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.gradients import check_finite_norm, global_norm
from booster_core.plugin import (
    BoostContext,
    Boosted,
    Capability,
    ModelWrapper,
    OptimizerWrapper,
    Plugin,
    like,
    place_model,
)
from booster_runtime.data import shard_dataloader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core import PrecisionPolicy


class LocalSGDPlugin(Plugin):
    """Train in data parallel and communicate only every few steps.

    Args:
        sync_every: Number of optimizer steps between two averages of the parameters; 1 averages after each step.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If ``sync_every`` is below 1.

    Reference: Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767).
    """

    name: ClassVar[str] = "local_sgd"
    api_version: ClassVar[int] = 2
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.CPU, Capability.CUDA, Capability.FP32, Capability.BF16, Capability.DATA_PARALLEL}
    )

    def __init__(self, sync_every: int = 8, *, precision: PrecisionPolicy | str | None = None) -> None:
        if sync_every < 1:
            msg = f"`sync_every={sync_every}` counts optimizer steps and must be at least 1."
            raise ConfigError(msg)
        self.sync_every = sync_every
        self.precision = precision

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Broadcast rank 0's parameters and buffers, and wrap model and optimizer.

        Collective: every rank of the world.
        """
        model = objects.model
        place_model(model, objects.optimizers, context.device, context.precision)
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)
        optimizers = [LocalSGDOptimizer(each, model, self.sync_every, context=context) for each in objects.optimizers]
        return objects._replace(
            model=ModelWrapper(model, precision=context.precision),
            optimizer=like(objects.optimizer, optimizers),
            dataloader=shard_dataloader(objects.dataloader, self, context),
        )

    def prepare_save(self, model: ModelWrapper, context: BoostContext) -> None:
        """Average the parameters over the ranks, so that a checkpoint is of all ranks' work.

        Collective: every rank of the world.
        """
        del context
        average(model)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return {"sync_every": self.sync_every}


class LocalSGDOptimizer(OptimizerWrapper):
    """Step an optimizer, and average the model's parameters over the ranks every ``sync_every`` steps."""

    def __init__(self, optim: Optimizer, model: nn.Module, sync_every: int, **kwargs: Any) -> None:
        super().__init__(optim, **kwargs)
        self.model = model
        self.sync_every = sync_every

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients of all ranks by one factor, so that no rank's norm is above ``max_norm``.

        Returns:
            The largest of the ranks' norms.

        Collective: every rank of the world.
        """
        gradients = self.gradients()
        # The largest of NaN and a number may be the number; infinity is as bad a norm.
        norm = global_norm(gradients, norm_type).nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        if error_if_nonfinite:
            check_finite_norm(norm)
        for gradient in gradients:
            gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step on this rank's gradients, and average after every ``sync_every`` steps.

        Collective: every rank of the world, in step.
        """
        result = super().step(closure)
        if self.num_steps % self.sync_every == 0:
            average(self.model)
        return result


def average(model: nn.Module) -> None:
    """Average trained parameters and floating-point buffers over the ranks, in place.

    Collective: every rank of the world.
    """
    tensors: list[Tensor] = [parameter.data for parameter in model.parameters() if parameter.requires_grad]
    tensors += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for work in [dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True) for tensor in tensors]:
        work.wait()
