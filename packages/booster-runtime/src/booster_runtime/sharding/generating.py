"""Generating texts on ranks that need each other in every forward: all take as many as the longest text."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

    from booster_core.plugin import ModelWrapper


def generating_model(model: nn.Module) -> Any:
    """Return the model that has transformers' ``generate``: the user's, or the one inside its adapters, or ``None``."""
    transformers = sys.modules.get("transformers")  # a model of it can't be there without it
    if transformers is None:
        return None
    kind = transformers.GenerationMixin
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def generate_together(model: ModelWrapper) -> None:
    """Let ``generate`` of a boosted model of transformers go on until every rank's texts are complete.

    transformers does so by itself for DeepSpeed's ZeRO-3 and for FSDP: it is its option ``synced_gpus``. Ranks whose
    texts end first would leave the others waiting for their parts of the parameters.

    Args:
        model: The boosted model, whose ranks gather parameters from each other.
    """
    if generating_model(model.unwrap()) is not None:
        model.replace_method("generate", _together)


def _together(model: ModelWrapper) -> Any:
    method: Any = model.unwrap().generate

    @functools.wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("synced_gpus", dist.get_world_size() > 1)
        return method(*args, **kwargs)

    return generate
