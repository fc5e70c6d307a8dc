"""A check that parameters which were frozen at ``boost`` stay frozen: no optimizer would step them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from booster_core.errors import GradientError
from booster_core.plugin import OptimizerWrapper, unwrap_model
from booster_core.state import NamedTensors

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import Boosted

_names: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""The frozen parameters of models that are being boosted."""


def note_frozen(objects: Boosted) -> None:
    """Note which parameters are frozen before the plugin lays out a model.

    Collective: none.
    """
    if objects.optimizer is not None:
        _names[unwrap_model(objects.model)] = _untrained_names(objects.model, objects.optimizer)


def watch_frozen(boosted: Boosted) -> None:
    """Let each step of the boosted optimizer check that what was frozen still is.

    Collective: none.
    """
    model = unwrap_model(boosted.model)
    names = _names.pop(model, set())
    if isinstance(boosted.optimizer, OptimizerWrapper):
        boosted.optimizer.frozen = FrozenParameters(model, names)


def _untrained_names(model: nn.Module, optimizer: Optimizer) -> set[str]:
    """Return the names of a model's frozen parameters that its optimizer does not list."""
    listed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    name_of = NamedTensors.of(model).name_of
    return {
        name_of[id(parameter)]
        for parameter in model.parameters()
        if not parameter.requires_grad and id(parameter) not in listed
    }


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

        Collective: none.
        """
        if not any(tensor.requires_grad for tensor in self._tensors.values()):
            return
        listed = optimizer.listed_parameters()
        names = [name for name, tensor in self._tensors.items() if tensor.requires_grad and id(tensor) not in listed]
        if names:
            msg = (
                f"{len(names)} parameters that were frozen at `boost` require gradients now, such as '{names[0]}', and "
                "would not be trained. Unfreeze them (or set the adapter) before the optimizer is made and `boost` is "
                "called, or freeze them again before `step`."
            )
            raise GradientError(msg)
