"""Number formats of a run: from the precision that was asked for to torch's ``MixedPrecisionPolicy`` for each unit.

Parameters are kept in fp32 and gathered in a narrower dtype. Forward then runs under autocast, which chooses a dtype
for each operation, or with ``mixed_precision`` as ``fully_shard`` does by itself: inputs are cast, operations follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from booster_core.errors import ConfigError
from booster_core.precision import NARROW, PrecisionPolicy

if TYPE_CHECKING:
    from booster_fsdp.config import FSDPConfig

_NOT_ASKED = PrecisionPolicy(param_dtype=None, follows_model=True)


def resolve_formats(config: FSDPConfig, asked: PrecisionPolicy) -> PrecisionPolicy:
    """Return the precision of a run, from what was asked for by name and the policy of torch in the options.

    Raises:
        ConfigError: If they differ.
    """
    theirs = config.mixed_precision
    if theirs is None:
        return asked
    compute = theirs.param_dtype or torch.float32
    reduced = reduce_dtype(theirs, torch.float32) or torch.float32  # of parameters in fp32
    if compute not in (torch.float32, *NARROW):
        msg = f"`mixed_precision` has `param_dtype={compute}`. Use torch.bfloat16, torch.float16 or torch.float32."
        raise ConfigError(msg)
    if asked == _NOT_ASKED:
        return replace(asked, compute_dtype=compute, reduce_dtype=reduced, output_dtype=theirs.output_dtype)
    for what, ours, other in (
        ("param_dtype", asked.compute_dtype, compute),
        ("reduce_dtype", asked.reduce_dtype, reduced),
        ("output_dtype", asked.output_dtype, theirs.output_dtype or asked.output_dtype),
    ):
        if ours != other:
            msg = (
                f"`mixed_precision` has {what} {other}, and the precision '{asked.name}' asks for {ours} there. Give "
                "formats in one place: leave out the precision, or change the policy."
            )
            raise ConfigError(msg)
    return asked


def uses_autocast(config: FSDPConfig, policy: PrecisionPolicy) -> bool:
    """Return whether forward runs under autocast."""
    return policy.uses_autocast and config.mixed_precision is None


def gathers_narrow(config: FSDPConfig, policy: PrecisionPolicy) -> bool:
    """Return whether parameters are gathered in a narrower dtype than that in which they are kept."""
    is_cast = policy.uses_autocast or config.mixed_precision is not None
    return is_cast and policy.compute_dtype in NARROW


def unit_format(
    config: FSDPConfig, policy: PrecisionPolicy, dtype: torch.dtype | None, *, is_root: bool, is_rounded: bool = True
) -> MixedPrecisionPolicy:
    """Return the dtypes of a unit.

    Args:
        config: Options.
        policy: Precision of the run.
        dtype: The dtype of the unit's trained parameters, or of its frozen ones; ``None`` if it has none.
        is_root: Whether the unit is the model itself.
        is_rounded: Whether a narrow precision gathers it in its dtype; else each parameter is gathered in its own.
    """
    if config.mixed_precision is not None:
        return replace(config.mixed_precision, output_dtype=policy.output_dtype if is_root else None)
    gathered = policy.compute_dtype if policy.uses_autocast and is_rounded else None
    reduced: torch.dtype | None = policy.reduce_dtype
    is_wider = dtype is not None and policy.param_dtype is None and dtype.itemsize > policy.reduce_dtype.itemsize
    if is_wider or (gathered is None and reduced == dtype):
        reduced = None
    # Autocast handles inputs, and the wrapper outputs.
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)


def reduce_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which torch reduces the gradients of a unit.

    Args:
        policy: The unit's dtypes.
        dtype: That of the unit's trained parameters; ``None`` if it has none.
    """
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    # Before torch 2.15, which brought that method, the dtype of the gathered parameters came first.
    return dtype if hasattr(FSDPModule, "finalize_backward") else policy.param_dtype or dtype


def describe_formats(
    config: FSDPConfig, policy: PrecisionPolicy, kept: set[torch.dtype], *, has_unrounded: bool = False
) -> str:
    """Return what `Booster.describe` says of the formats of forward, of parameters and of optimizer state."""
    how = "by autocast" if uses_autocast(config, policy) else "without autocast"
    compute = str(policy.compute_dtype).removeprefix("torch.")
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in kept))
    if not gathers_narrow(config, policy):
        return f"forward and backward in the dtype of the parameters, kept in {names}"
    gathered = f"{compute}, those in a unit with a frozen base as they are" if has_unrounded else compute
    return f"forward and backward in {compute} {how}; parameters kept in {names} and gathered in {gathered}"
