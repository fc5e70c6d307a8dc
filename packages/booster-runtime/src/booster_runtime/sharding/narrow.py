"""Which parameters a run in bf16 or fp16 leaves in their own format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_core.plugin import holds_numbers, normalisation_parameters
from booster_core.precision import NARROW
from booster_core.state import frozen_base

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from booster_core.precision import PrecisionPolicy


def working_dtypes(model: nn.Module, policy: PrecisionPolicy) -> Callable[[nn.Parameter], torch.dtype]:
    """Return a function from a parameter to the dtype that forward and backward use for it.

    Under a narrow format, the base that is frozen next to adapters stays in its own, unless everything is to be narrow:
    it is pretrained, and is not rounded. So does batch normalisation, which computes its statistics in fp32, and whose
    kernel on the CPU needs its parameters in fp32 as well.

    Args:
        model: The model, whole.
        policy: Precision of the run, whose format of parameters is that of forward.
    """
    dtype = policy.param_dtype
    kept: set[int] = set()
    if dtype in NARROW:
        kept = normalisation_parameters(model) | (set() if policy.is_pure else frozen_base(model))

    def dtype_of(parameter: nn.Parameter) -> torch.dtype:
        is_left = not holds_numbers(parameter) or id(parameter) in kept
        if dtype is None or is_left or (policy.follows_model and parameter.dtype == torch.float64):
            return parameter.dtype
        return dtype

    return dtype_of
