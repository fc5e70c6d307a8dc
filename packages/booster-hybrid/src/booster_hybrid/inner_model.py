"""`inner_model`: the user's model inside of what others have put around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.state import compiled_module, without_adapters

if TYPE_CHECKING:
    from torch import nn


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside of its compiler and adapters: its class has a policy, and names in it are the user's.

    Its layers have their adapters all the same: peft puts them there in place.

    Args:
        model: The user's model.
    """
    return without_adapters(compiled_module(model) or model)
