"""LocalSGD and DiLoCo of torchft over replica groups: groups step apart, and synchronize parameters now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import unwrap_model
from booster_core.state import ReplicatedStateAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from booster_core.plugin import ModelWrapper, OptimizerWrapper
    from booster_core.state import StateAdapter
    from booster_ft.groups import ReplicaGroups


class SemiSynchronous:
    """Synchronizes the parameters of replica groups each time that the optimizer has taken some steps.

    Args:
        groups: This group among the others.
        model: The boosted model.
        optimizer: Its optimizer.
        sync_every: Number of steps.
        outer_optimizer: Makes the optimizer that steps at a synchronization (DiLoCo); ``None`` averages (LocalSGD).
        adapter: The view of the model's state.

    Raises:
        ConfigError: If ranks don't hold the whole model, or the optimizer steps on copies of its parameters.
    """

    def __init__(
        self,
        groups: ReplicaGroups,
        model: ModelWrapper,
        optimizer: OptimizerWrapper,
        sync_every: int,
        outer_optimizer: Callable[[Any], Optimizer] | None,
        adapter: StateAdapter,
    ) -> None:
        module = unwrap_model(model)
        trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        if not isinstance(adapter, ReplicatedStateAdapter) or not trained <= optimizer.listed_parameters():
            msg = (
                "`sync_every` needs an inner plugin that keeps the whole model on each rank and steps on its own "
                "parameters, such as inner='ddp'. Leave `sync_every` out, and gradients are averaged in each step."
            )
            raise ConfigError(msg)
        self._groups, self._module, self._optimizer = groups, module, optimizer.unwrap()
        self._sync_every, self._outer_optimizer = sync_every, outer_optimizer
        self._synchronizer: Any = None

    def begin(self) -> None:
        """Join the other groups before the first step.

        Collective: every rank of the group, at the first time.
        """
        if self._synchronizer is not None:
            return
        from torchft.local_sgd import DiLoCo, LocalSGD

        self._groups.first_values()
        manager = self._groups.manager
        if self._outer_optimizer is None:
            self._synchronizer = LocalSGD(manager, self._module, self._optimizer, self._sync_every)
        else:
            outer = self._outer_optimizer([each for each in self._module.parameters() if each.requires_grad])
            self._synchronizer = DiLoCo(
                manager, [self._module], self._optimizer, outer, self._sync_every, pin_memory=torch.cuda.is_available()
            )
        self._synchronizer.__enter__()
