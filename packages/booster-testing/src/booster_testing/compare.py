"""Compare two runs of the same training, tensor by tensor, with tolerances that state their reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_runtime.rounding import (  # noqa: F401 - whoever compares takes them from here
    ADAPTIVE,
    EXACT,
    Tolerance,
    largest_difference,
    tolerance_for,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from booster_testing.training import Trained, Training


__tracebackhide__ = True
"""Tells pytest that a failure is explained by its message, and not by the code here."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype in which a run of each precision computes."""


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


def assert_equals_one_process(
    results: Sequence[Trained], expected: Trained, training: Training, num_ranks: int, *, with_state: bool = True
) -> None:
    """Assert that ranks have trained as one process: gradients, norms, parameters and state, each by name.

    Args:
        results: Of each rank.
        expected: Of one process.
        training: Its settings.
        num_ranks: Number of data parallel ranks.
        with_state: Compare the optimizer's state too.

    Raises:
        AssertionError: If they differ.
    """
    first = tolerance_for(DTYPES[training.precision or "fp32"])
    later = first if training.optimizer == "sgd" or training.precision is not None else ADAPTIVE
    # Low precision rounds later steps' parameters otherwise.
    num_steps = len(expected.gradients) if first == tolerance_for(torch.float32) else 1
    tolerances = [first, *[later] * (num_steps - 1)]
    for actual in results:
        assert_same_gradients(actual.gradients[:1], expected.gradients[:1], tolerances[:1], num_ranks)
        found, wanted = ({"gradient norm of step 1": torch.tensor(each.norms[:1])} for each in (actual, expected))
        assert_same_tensors(found, wanted, first)
        assert_same_gradients(actual.gradients[:num_steps], expected.gradients[:num_steps], tolerances, num_ranks)
        assert_same_tensors(actual.parameters, expected.parameters, later)
        if with_state:
            absent = sorted(expected.state.keys() - actual.state.keys())
            assert not absent, f"`optimizer_shards` shows no {', '.join(absent[:10])}: checkpoints would lack them"
            assert_same_tensors({key: actual.state[key] for key in expected.state}, expected.state, later)


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
    before: Mapping[str, Tensor] = {}
    for step, (found, wanted, tolerance) in enumerate(zip(actual, expected, tolerances, strict=True), start=1):
        shown = {name: found[name] for name in wanted if name in found}
        try:
            assert_same_tensors(shown, wanted, tolerance)
        except AssertionError as error:
            cause = probable_cause(shown, wanted, tolerance, num_ranks, before)
            msg = f"Gradients of step {step}: {error}{cause and f'. {cause}'}"
            raise AssertionError(msg) from None
        before = wanted


def probable_cause(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: Tolerance,
    num_ranks: int,
    before: Mapping[str, Tensor],
) -> str:
    """Return what explains that gradients differ, in a sentence; nothing where no simple cause does.

    Args:
        actual: Gradients by name.
        expected: Those of one process, with the same names or more.
        tolerance: Of the comparison.
        num_ranks: Number of data parallel ranks.
        before: The gradients of the step before, which were right; empty at the first step.
    """
    absent = sorted(expected.keys() - actual.keys())
    if absent:
        return (
            f"A rank has no gradient of {', '.join(absent[:10])}: one whose own samples don't use a parameter brings "
            "zeros, and gets the average"
        )
    factors = {name: _factor(tensor, expected[name], tolerance) for name, tensor in actual.items()}
    told = {name: factor for name, factor in factors.items() if bool(expected[name].any())}
    known = [factor for factor in told.values() if factor is not None]
    if not told or len(known) < len(told):
        return _left_over(actual, expected, tolerance, before)  # at least one is no multiple
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


def _left_over(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance, before: Mapping[str, Tensor]
) -> str:
    both = [name for name in before if name in actual and actual[name].shape == expected[name].shape]
    factors = [_factor(actual[name] - expected[name], before[name], tolerance) for name in both]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors) or not _is_one(max(known) / (min(known) or 1.0), tolerance):
        return ""
    return f"They hold {known[0]:.2f} times those of the step before: gradients are not reset"


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
