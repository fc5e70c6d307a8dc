"""The narrow number formats, and which parameters a run in one of them leaves as they are."""

from __future__ import annotations

import torch
from torch import nn

NARROW = (torch.bfloat16, torch.float16)
"""Formats with fewer bits than fp32 in which models are trained."""


def kept_as_they_are(model: nn.Module) -> set[int]:
    """Return the ids of parameters that stay in their format under a narrow one.

    Batch normalisation computes its statistics in fp32, and torch's CPU kernel wants its parameters so as well.
    """
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the common base of all of them
        for parameter in module.parameters(recurse=False)
    }
