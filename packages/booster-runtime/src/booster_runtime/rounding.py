"""How far two results of the same arithmetic in another order are apart, and how far rounding lets them be.

The measures and the one table of whoever compares a run with another one: verifications and the conformance kit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ADAPTIVE", "EXACT", "Tolerance", "largest_difference", "relative_error", "tolerance_for"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed difference of two results of the same arithmetic in another order, and its reason.

    Args:
        relative: Largest difference as a fraction of the size, by one of the measures below. Rounding errors of
            sums scale with the largest terms, so small elements may differ by more than their own size.
        reason: The cause of the difference.
    """

    relative: float
    reason: str


ADAPTIVE = Tolerance(
    relative=2e-3,
    reason="an adaptive optimizer divides by a running gradient magnitude: near zero, roundings change a whole step",
)
"""For parameters after steps of Adam and its kind in fp32."""
EXACT = Tolerance(relative=0.0, reason="the same arithmetic in the same order")

_BY_DTYPE = {
    torch.float64: (1e-12, 1e-9, "sums over another order of ranks or micro-batches, in fp64"),
    torch.float32: (1e-5, 1e-4, "sums of some thousand terms in another order: about 100 roundings of 2**-24 each"),
    torch.float16: (
        5e-3,
        2e-2,
        "fp16 keeps 11 bits: a few roundings of 2**-11 each where a batch is split in another way",
    ),
    torch.bfloat16: (
        4e-2,
        8e-2,
        "bf16 keeps 8 bits: a few roundings of 2**-8 each where a batch is split in another way",
    ),
}
"""Of models with some thousand parameters, and of any model: longer sums, and more layers that round."""


def tolerance_for(dtype: torch.dtype, *, of_any_model: bool = False) -> Tolerance:
    """Return the tolerance for results that were computed in a dtype, independent of how they are stored.

    Args:
        dtype: In which they were computed.
        of_any_model: Whether the model can be of any size, and not one of some thousand parameters as in tests.
    """
    small, large, reason = _BY_DTYPE[dtype]
    return Tolerance(relative=large if of_any_model else small, reason=reason)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, as a fraction of the expected one's largest magnitude.

    The stricter measure: one wrong element is seen among any number. For models of tests.
    """
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    scale = expected.double().abs().max()
    if not bool(difference.isfinite()):
        return math.inf
    return float(difference / scale) if float(scale) > 0 else float(difference)


def relative_error(actual: Tensor, expected: Tensor, size: float | None = None) -> float:
    """Return the L2 norm of the difference of two tensors, as a fraction of the expected one's norm.

    For models of any size: in narrow formats, the largest of many rounding errors is far from the typical one.

    Args:
        actual: What was found.
        expected: What it should be.
        size: The norm to divide by instead, where this is a part of a tensor, or one of rounding errors alone.

    Returns:
        Infinity where the shapes differ.
    """
    if actual.shape != expected.shape:
        return math.inf
    size = max(float(expected.double().norm()), 1e-30) if size is None else size
    return float((actual.double() - expected.double()).norm()) / size
