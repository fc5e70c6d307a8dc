"""What a recorder has to know of torch's operations: which make tensors from nothing, which overwrite, which read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_strided",
        "empty_like",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "full_like",
        "new_full",
    )
)
"""What makes a tensor without needing values. Constants (``arange``, ``linspace``, literals) stay real: what reads them
is then computed as in eager construction, and they are small."""

UNSET = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Those whose results hold nothing yet."""

COPIES = frozenset({"aten::_to_copy", "aten::clone"})
"""What makes a tensor of its first argument's values, in memory that a replay may choose."""

SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_empty_strided",
        "new_zeros",
        "new_ones",
        "new_full",
    )
)
"""What asks a tensor for its shape, dtype and strides only."""

OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in (
        "zero",
        "fill",
        "copy",
        "normal",
        "uniform",
        "random",
        "bernoulli",
        "exponential",
        "log_normal",
        "cauchy",
        "geometric",
    )
)
"""What writes its first argument without reading it."""

_UNTOLD_WRITES = {f"aten::{name}_batch_norm": ("running_mean", "running_var") for name in ("native", "cudnn", "miopen")}
"""Arguments that are written although torch's schema does not say so."""

_SMALL_NUMEL = 1024
"""Integers up to this number are made for real: they tend to steer construction."""


def is_random(func: Any) -> bool:
    """Return whether an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_deferrable(func: Any, result: torch.Tensor) -> bool:
    """Return whether a tensor made without lazy inputs becomes lazy.

    Args:
        func: The operation.
        result: A meta tensor of the result's geometry.
    """
    if is_random(func):
        return True
    if not result.numel():  # a shell that is given a memory, as when files are unpickled
        return False
    return result.is_floating_point() or result.is_complex() or result.numel() > _SMALL_NUMEL


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes in place, lists flattened."""
    untold = _UNTOLD_WRITES.get(func._schema.name, ())  # noqa: SLF001 - what dispatch modes are meant to read
    for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        if not is_write and argument.name not in untold:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if isinstance(value, (list, tuple)):
            yield from value
        elif value is not None:
            yield value
