"""Which parameters a run in bf16 or fp16 leaves in their own format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from booster_core.precision import NARROW
from booster_core.state import frozen_base

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def normalisation_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of batch normalisation."""
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the common base of all of them
        for parameter in module.parameters(recurse=False)
    }


def working_dtypes(model: nn.Module, param_dtype: torch.dtype | None) -> Callable[[nn.Parameter], torch.dtype]:
    """Return a function from a parameter to the dtype that forward and backward use for it.

    Under a narrow format, the base that is frozen next to adapters stays in its own: it is pretrained, and is not
    rounded. So does batch normalisation, which computes its statistics in fp32, and whose kernel on the CPU needs its
    parameters in fp32 as well.

    Args:
        model: The model, whole.
        param_dtype: The run's format of parameters; ``None`` leaves all as they are.
    """
    kept = normalisation_parameters(model) | frozen_base(model) if param_dtype in NARROW else set()

    def dtype_of(parameter: nn.Parameter) -> torch.dtype:
        is_left = param_dtype is None or not parameter.is_floating_point() or id(parameter) in kept
        return parameter.dtype if param_dtype is None or is_left else param_dtype

    return dtype_of
