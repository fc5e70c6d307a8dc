"""The narrow number formats, and which parameters a run in one of them leaves as they are."""

from __future__ import annotations

import torch
from torch import nn

from booster_core.state.adapted import frozen_base

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
