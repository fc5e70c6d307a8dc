"""A check that parameters which were frozen at ``boost`` stay frozen: no optimizer would step them.

Among them are parameters that the user's optimizer listed: `booster_runtime.lora.drop_frozen` takes the base of
adapters out of it. On one device and under FSDP nothing else tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import GradientError
from booster_core.plugin import unwrap_model
from booster_core.state import NamedTensors

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor, nn

    from booster_core.plugin import Boosted, OptimizerWrapper


def frozen_parameters(objects: Boosted) -> set[str]:
    """Return the names of a model's frozen parameters that no optimizer lists, before a strategy lays the model out."""
    if not objects.optimizers:
        return set()
    listed = {
        id(parameter) for each in objects.optimizers for group in each.param_groups for parameter in group["params"]
    }
    name_of = NamedTensors.of(objects.model).name_of
    return {
        name_of[id(parameter)]
        for parameter in objects.model.parameters()
        if not parameter.requires_grad and id(parameter) not in listed
    }


def watch_frozen(boosted: Boosted, names: Collection[str]) -> None:
    """Let each step of a boosted optimizer check that what was frozen still is."""
    for optimizer in boosted.optimizers[:1]:
        optimizer.frozen = FrozenParameters(unwrap_model(boosted.model), names)


class FrozenParameters:
    """Checks at each step that the parameters which an optimizer does not train are still frozen.

    Args:
        model: The user's own model, as the strategy has laid it out.
        names: The parameters; what a parameter group that is added later lists is trained.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        tensors = NamedTensors.of(model).tensors
        self._tensors: dict[str, Tensor] = {name: tensors[name] for name in sorted(names) if name in tensors}

    def check(self, optimizer: OptimizerWrapper) -> None:
        """Check that none requires gradients.

        Raises:
            GradientError: If one does.
        """
        if not any(tensor.requires_grad for tensor in self._tensors.values()):
            return
        listed = set().union(*(each.listed_parameters() for each in optimizer.scaling.optimizers))
        names = [name for name, tensor in self._tensors.items() if tensor.requires_grad and id(tensor) not in listed]
        if names:
            msg = (
                f"{len(names)} parameters that were frozen at `boost` require gradients now, such as '{names[0]}', and "
                "would not be trained. Unfreeze them (or set the adapter) before the optimizer is made and `boost` is "
                "called, or freeze them again before `step`."
            )
            raise GradientError(msg)
