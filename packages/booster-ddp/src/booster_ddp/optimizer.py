"""`DDPOptimizer`: steps only with gradients that are averaged over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import OptimizerWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from booster_ddp.gradients import UnreducedGradients

_REMEDIES = {
    "gradient which is undefined, but still allreduced": (
        "Some gradients of backward under `no_sync` were dropped and others kept, so that DDP can't tell which "
        "parameters this step uses. Drop all of them, by `optimizer.zero_grad()` or `model.zero_grad()`."
    ),
    "mark a variable ready only once": (
        "DDP was told of a parameter twice. Where layers are checkpointed with `use_reentrant=True`, its search does "
        "not see them: pass `use_reentrant=False`, or `find_unused_parameters=False` to the plugin. Else this backward "
        "and the previous one both use some of the parameters, and each leaves others unused: run all forward and "
        "backward passes of the step under `booster.no_sync`; "
        "`optimizer.step()` then averages the gradients."
    ),
    "Expected sparse gradient to be defined": (
        "A table with sparse gradients was not used on this rank, and DDP can't average those of the others. Run "
        "forward and backward under `booster.no_sync`; `optimizer.step()` then averages the gradients. Or make the "
        "embedding with `sparse=False`."
    ),
}
"""What to do about errors of DDP's backward, by what they say."""


class DDPOptimizer(OptimizerWrapper):
    """Step only with gradients that are averaged over all ranks.

    Args:
        optim: The optimizer inside.
        averaged: Averages the gradients of the model, for all of its optimizers.
        **kwargs: As for `OptimizerWrapper`.
    """

    def __init__(self, optim: Optimizer, averaged: UnreducedGradients, **kwargs: Any) -> None:
        super().__init__(optim, **kwargs)
        self._averaged = averaged

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss; see `OptimizerWrapper.backward`.

        Raises:
            GradientError: If DDP has averaged some of the gradients already, and this backward adds to them.

        Collective: every rank of the world, in step, outside of ``no_sync``.
        """
        try:
            super().backward(loss, inputs, retain_graph=retain_graph)
        except RuntimeError as cause:
            remedy = next((remedy for said, remedy in _REMEDIES.items() if said in str(cause)), None)
            if remedy is None:
                raise
            raise GradientError(remedy) from cause

    def check_inputs(self, inputs: tuple[Any, ...]) -> None:
        """Check that DDP's reducer can finish with the gradients of some tensors only.

        Raises:
            ConfigError: If it waits for those of other parameters too.
        """
        super().check_inputs(inputs)
        ids = {id(each) for each in inputs}
        trained = self._averaged.trained
        num_inputs = sum(id(parameter) in ids for parameter in trained.values())
        if not self._averaged.can_finish(num_inputs):
            msg = (
                f"`inputs` has {num_inputs} of the {len(trained)} parameters that DDP averages together, and it would "
                "wait for the others. Leave `inputs` out, or run this forward and backward under `booster.no_sync`; "
                "`optimizer.step()` then averages the gradients."
            )
            raise ConfigError(msg)

    def drawing_group(self) -> ProcessGroup | None:
        """Return all ranks, which hold the same model."""
        return dist.group.WORLD

    def settle(self) -> None:
        """Average gradients that DDP has not; see `UnreducedGradients.settle`."""
        self._averaged.settle()

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

        Collective: every rank of the world.
        """
        if closure is None:
            self.settle()
        self.scaling.settings.find_written(self._averaged.trained)
        result = super().step(closure)
        self.scaling.settings.note_versions(self._averaged.trained)
        if (model := self._averaged.model) is not None:
            model.after_step()
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
