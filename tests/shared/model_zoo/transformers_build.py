"""Build a transformers model from a config."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def from_config(config_class: str, model_class: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds the model; a nested dict in the settings becomes a sub-config."""
    return partial(_build, config_class, model_class, settings)


def _build(config_class: str, model_class: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, config_class)(**settings)
    _without_dropout(config)
    model: nn.Module = getattr(transformers, model_class)(config)
    # Queries and embeddings that start at zero make layer norms ill-conditioned, or have zero gradients.
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _without_dropout(config: Any) -> None:
    """Set dropout probabilities in the config and its sub-configs to zero."""
    from transformers import PreTrainedConfig

    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
