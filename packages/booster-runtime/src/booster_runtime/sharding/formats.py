"""Number formats: which parameters stay in their own, and what `Booster.describe` says of sums of gradients.

On the CPU, booster-runtime adds narrow formats up in fp32. Backends of devices, such as NCCL, add up in the format that
is sent, whatever format the result is stored in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.plugin import holds_numbers, normalisation_parameters
from booster_core.precision import NARROW
from booster_core.state import frozen_base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


_REDUCTIONS = "_booster_reductions"
"""Attribute of a model: lines about how its gradients are summed."""
_COMPUTE = "_booster_compute"
"""Attribute of a model: a line about the formats of forward and backward."""
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def note_reductions(
    model: nn.Module,
    sent: Iterable[torch.dtype],
    device: torch.device,
    *,
    by_backend: bool = False,
    is_rounded: bool = False,
) -> None:
    """Remember in which formats a model's gradients are sent, for `Booster.describe`.

    Args:
        model: The user's model.
        sent: The formats.
        device: Where the gradients are.
        by_backend: Whether the backend adds up on the CPU too, instead of `booster_runtime.collectives`.
        is_rounded: Whether sums are stored in the format that is sent.
    """
    formats = sorted(set(sent), key=lambda dtype: -dtype.itemsize)
    if dist.get_world_size() == 1:
        lines = []
    else:
        by_backend = by_backend or device.type != "cpu"
        lines = [_described(dtype, device, by_backend=by_backend, is_rounded=is_rounded) for dtype in formats]
    model.__dict__[_REDUCTIONS] = lines


def note_compute(model: nn.Module, line: str) -> None:
    """Remember what a strategy computes in and how, for `Booster.describe`.

    Args:
        model: The user's model.
        line: Says so, as in "forward in bf16".
    """
    model.__dict__[_COMPUTE] = line


def describe_reductions(models: Iterable[nn.Module]) -> list[str]:
    """Return lines that say in which formats models compute, where noted, and how gradients are summed over ranks."""
    models = list(models)
    computed = dict.fromkeys(model.__dict__[_COMPUTE] for model in models if _COMPUTE in model.__dict__)
    found = dict.fromkeys(line for model in models for line in model.__dict__.get(_REDUCTIONS, ()))
    return [f"compute    {line}" for line in computed] + [f"reduction  gradients are {line}" for line in found]


def _described(dtype: torch.dtype, device: torch.device, *, by_backend: bool, is_rounded: bool) -> str:
    name = _NAMES.get(dtype, str(dtype))
    if not by_backend:
        rounded = f", and rounded to {name}" if is_rounded and dtype in NARROW else ""
        return f"sent in {name}, summed in {'fp32' if dtype in NARROW else name} in rank order{rounded}"
    backends = dict(each.split(":") for each in dist.get_backend_config().split(","))
    return f"sent in {name}, summed in {name} by {backends.get(device.type, 'the backend')}"
