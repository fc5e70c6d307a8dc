"""Generating texts on ranks that need each other in every forward: all take as many as the longest text."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_core.ranks import NamedCall

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
    texts end first would leave the others waiting for their parts of the parameters. Scripts call ``generate`` of the
    user's own model, too.

    Args:
        model: The boosted model, whose ranks gather parameters from each other.
    """
    inner = generating_model(model.unwrap())
    if inner is not None:
        for each in {id(each): each for each in (model.unwrap(), inner)}.values():
            if callable(getattr(each, "generate", None)):
                each.generate = _Together(each)


class _Together:
    """The method ``generate`` of a model, on all ranks; copies of the model have their own again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # which has this
        # What torch's FSDP has put in place of the class's gathers what no unit holds. A compiled model's has none.
        own: Any = model.generate
        self.__wrapped__ = own.__func__ if hasattr(own, "__func__") else type(model).generate  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("synced_gpus", dist.get_world_size() > 1)
        with NamedCall("generate"):
            return self.__wrapped__(self._model(), *args, **kwargs)

    def __reduce__(self) -> Any:
        return functools.partial, (self.__wrapped__, self._model())
