"""The narrow number formats, and which parameters a run in one of them leaves as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from booster_core.state.adapted import frozen_base

if TYPE_CHECKING:
    from collections.abc import Callable

NARROW = (torch.bfloat16, torch.float16)
"""Formats with fewer bits than fp32 in which models are trained."""


def kept_as_they_are(model: nn.Module) -> set[int]:
    """Return the ids of parameters that stay in their format under a narrow one.

    What is frozen beside adapters is somebody's pretrained model, and not to be rounded. Batch normalisation computes
    its statistics in fp32, and torch's CPU kernel wants its parameters so as well.
    """
    normalised = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the common base of all of them
        for parameter in module.parameters(recurse=False)
    }
    return normalised | frozen_base(model)


def working_dtypes(model: nn.Module, param_dtype: torch.dtype | None) -> Callable[[nn.Parameter], torch.dtype]:
    """Return what tells in which format each of a model's parameters is worked with.

    Args:
        model: The model, whole.
        param_dtype: The run's format of parameters; ``None`` leaves all as they are.
    """
    kept = kept_as_they_are(model) if param_dtype in NARROW else set()

    def dtype_of(parameter: nn.Parameter) -> torch.dtype:
        is_left = param_dtype is None or not parameter.is_floating_point() or id(parameter) in kept
        return parameter.dtype if param_dtype is None or is_left else param_dtype

    return dtype_of
