"""Compare two runs of the same training, tensor by tensor, with tolerances that state their reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed difference of two results of the same arithmetic in another order, and its reason.

    Args:
        relative: Largest difference as a fraction of the tensor's largest magnitude. Rounding errors of sums scale with
            the largest terms, so small elements may differ by more than their own size.
        reason: The cause of the difference.
    """

    relative: float
    reason: str


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype in which a run of each precision computes."""
ADAPTIVE = Tolerance(
    relative=2e-3,
    reason="an adaptive optimizer divides by a running gradient magnitude: near zero, roundings change a whole step",
)
"""For parameters after steps of Adam and its kind in fp32."""
EXACT = Tolerance(relative=0.0, reason="the same arithmetic in the same order")

_BY_DTYPE = {
    torch.float64: Tolerance(relative=1e-12, reason="sums over another order of ranks or micro-batches, in fp64"),
    torch.float32: Tolerance(
        relative=1e-5, reason="sums of some thousand terms in another order: about 100 roundings of 2**-24 each"
    ),
    torch.bfloat16: Tolerance(
        relative=4e-2,
        reason="bf16 keeps 8 bits: a few roundings of 2**-8 each where a batch is split in another way",
    ),
    torch.float16: Tolerance(
        relative=5e-3, reason="fp16 keeps 11 bits: a few roundings of 2**-11 each where a batch is split in another way"
    ),
}


def tolerance_for(dtype: torch.dtype) -> Tolerance:
    """Return the tolerance for results that were computed in a dtype, independent of how they are stored."""
    return _BY_DTYPE[dtype]


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, as a fraction of the expected one's largest magnitude."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    scale = expected.double().abs().max()
    if not bool(difference.isfinite()):
        return float("inf")
    return float(difference / scale) if float(scale) > 0 else float(difference)


def assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance) -> None:
    """Assert that two sets of named tensors agree; the error lists those that differ most.

    Raises:
        AssertionError: If names or shapes differ, or a tensor differs by more than the tolerance.
    """
    only_actual, only_expected = sorted(actual.keys() - expected.keys()), sorted(expected.keys() - actual.keys())
    if only_actual or only_expected:
        msg = f"Only in actual: {only_actual}; only in expected: {only_expected}"
        raise AssertionError(msg)
    shapes = [
        f"{name}: {tuple(actual[name].shape)} != {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if actual[name].shape != tensor.shape
    ]
    if shapes:
        msg = f"Shapes differ: {'; '.join(shapes)}"
        raise AssertionError(msg)
    differences = {name: largest_difference(actual[name], tensor) for name, tensor in expected.items()}
    beyond = {name: by for name, by in differences.items() if not by <= tolerance.relative}
    if beyond:
        worst = sorted(beyond.items(), key=lambda item: -item[1])[:10]
        listed = ", ".join(f"{name} by {by:.3g}" for name, by in worst)
        msg = (
            f"{len(beyond)} of {len(expected)} tensors differ by more than {tolerance.relative:g} "
            f"({tolerance.reason}): {listed}"
        )
        raise AssertionError(msg)
