"""Compare two runs of the same training, tensor by tensor, with tolerances that state their reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def assert_same_gradients(
    actual: Sequence[Mapping[str, Tensor]],
    expected: Sequence[Mapping[str, Tensor]],
    tolerances: Sequence[Tolerance],
    num_ranks: int,
) -> None:
    """Assert that the gradients of each step agree; the error names the first step that differs and a probable cause.

    Args:
        actual: Gradients by parameter name, one mapping for each step; parameters that one process gives no gradient
            are not compared.
        expected: Those of one process.
        tolerances: Of each step. Later steps start from parameters that differ by rounding.
        num_ranks: Number of data parallel ranks.

    Raises:
        AssertionError: If they differ.
    """
    for step, (found, wanted, tolerance) in enumerate(zip(actual, expected, tolerances, strict=True), start=1):
        shown = {name: found[name] for name in wanted if name in found}
        try:
            assert_same_tensors(shown, wanted, tolerance)
        except AssertionError as error:
            cause = probable_cause(shown, wanted, tolerance, num_ranks)
            msg = f"Gradients of step {step}: {error}{cause and f'. {cause}'}"
            raise AssertionError(msg) from None


def probable_cause(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance, num_ranks: int
) -> str:
    """Return what explains that gradients differ, in a sentence; nothing where no simple cause does.

    Args:
        actual: Gradients by name.
        expected: Those of one process, with the same names or more.
        tolerance: Of the comparison.
        num_ranks: Number of data parallel ranks.
    """
    factors = {name: _factor(tensor, expected[name], tolerance) for name, tensor in actual.items()}
    told = {name: factor for name, factor in factors.items() if bool(expected[name].any())}
    known = [factor for factor in told.values() if factor is not None]
    if not told or len(known) < len(told):
        return ""  # at least one is no multiple
    if max(known) - min(known) > tolerance.relative * max(map(abs, known)):
        wrong = sorted(name for name, factor in told.items() if factor is not None and not _is_one(factor, tolerance))
        listed = ", ".join(f"{name} by {told[name]:.2f}" for name in wrong[:10])
        return f"Some gradients are multiplied, and only those: {listed}"
    factor = known[0]
    if _is_one(factor, tolerance):
        cause = ""
    elif _is_one(factor / num_ranks, tolerance):
        cause = f"Gradients are summed over the ranks, not averaged: factor {factor:.2f}"
    elif _is_one(factor * num_ranks, tolerance):
        cause = f"Gradients are divided by the number of ranks once too often: factor {factor:.2f}"
    else:
        cause = f"All gradients are multiplied by the same factor: {factor:.4g}"
    return cause


def _is_one(factor: float, tolerance: Tolerance) -> bool:
    return abs(factor - 1) <= tolerance.relative


def _factor(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> float | None:
    """Return the number that a tensor is another's multiple by; ``None`` if it is none."""
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return None
    found, wanted = actual.double().flatten(), expected.double().flatten()
    square = float(wanted @ wanted)
    factor = float(found @ wanted) / square if square else 0.0
    return factor if largest_difference(found, factor * wanted) <= tolerance.relative else None
