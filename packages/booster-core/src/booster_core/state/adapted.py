"""The modules that peft puts around a user's, found without importing peft where it is not used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def peft_wrappers() -> tuple[tuple[type, str], ...]:
    """Return peft's classes that hold a module of the user's, each with the attribute that it is under.

    Collective: none.
    """
    if "peft" not in sys.modules:
        return ()
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return (
        (PeftModel, "base_model"),
        (BaseTuner, "model"),
        (BaseTunerLayer, "base_layer"),
        (AuxiliaryTrainingWrapper, "original_module"),
    )


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model that peft was given; ``model`` itself where it was given none.

    Its layers have their adapters all the same: peft puts them there in place.

    Collective: none.
    """
    if "peft" not in sys.modules:
        return model
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model
