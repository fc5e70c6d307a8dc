"""Whether peft has put adapters into a model, told without importing peft where nobody has used it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def is_adapted(model: nn.Module) -> bool:
    """Return whether a user's own model is one of peft's.

    Collective: none.
    """
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft has put adapters into a model.

    Collective: none.
    """
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def frozen_base(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are frozen next to adapters; none for a model without adapters.

    Collective: none.
    """
    if not has_adapters(model):
        return set()
    return {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
