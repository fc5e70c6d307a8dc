"""LocalSGD and DiLoCo of torchft over replica groups: groups step apart, and synchronize parameters now and then."""

from __future__ import annotations

import functools
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


def semi_synchronous(
    groups: ReplicaGroups,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    sync_every: int,
    outer_optimizer: Callable[[Any], Optimizer] | None,
    adapter: StateAdapter,
) -> Callable[[], None]:
    """Return what joins the other groups, to be called before the first step, on every rank of the group.

    Args:
        groups: This group among the others.
        model: The boosted model.
        optimizer: Its optimizer.
        sync_every: Number of its steps after which parameters are synchronized.
        outer_optimizer: Makes the optimizer that steps at a synchronization (DiLoCo); ``None`` averages (LocalSGD).
        adapter: The view of the model's state.

    Raises:
        ConfigError: If ranks don't hold the whole model, or the optimizer steps on copies of its parameters.
    """
    module = unwrap_model(model)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not isinstance(adapter, ReplicatedStateAdapter) or not {*map(id, trained)} <= optimizer.listed_parameters():
        msg = (
            "`sync_every` needs an inner plugin that keeps the whole model on each rank and steps on its own "
            "parameters, such as inner='ddp'. Leave `sync_every` out, and gradients are averaged in each step."
        )
        raise ConfigError(msg)

    @functools.cache
    def begin() -> None:
        from torchft.local_sgd import DiLoCo, LocalSGD

        groups.first_values()
        inner = optimizer.unwrap()
        if outer_optimizer is None:
            LocalSGD(groups.manager, module, inner, sync_every).__enter__()
        else:
            outer, pin = outer_optimizer(trained), torch.cuda.is_available()
            DiLoCo(groups.manager, [module], inner, outer, sync_every, pin_memory=pin).__enter__()

    return begin
