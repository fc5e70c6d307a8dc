"""Comparisons of tensors by name fail where anything differs, and say what."""

import math

import pytest
import torch

import booster_testing
from booster_testing.compare import (
    EXACT,
    Tolerance,
    assert_same_gradients,
    assert_same_tensors,
    largest_difference,
    probable_cause,
    tolerance_for,
)

CLOSE = Tolerance(relative=0.1, reason="for this test")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, r"Only in actual: \['a'\]; only in expected: \['b'\]"),
        ({}, {"b": torch.ones(2)}, r"only in expected: \['b'\]"),
        ({"a": torch.ones(2)}, {"a": torch.ones(1, 2)}, r"Shapes differ: a: \(2,\) != \(1, 2\)"),
        (
            {"a": torch.tensor([1.0, 9.0])},
            {"a": torch.tensor([1.0, 8.0])},
            r"1 of 1 .* 0.1 \(for this test\): a by 0.125",
        ),
        ({"a": torch.tensor([math.nan])}, {"a": torch.tensor([1.0])}, "a by inf"),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([math.nan])}, "a by inf"),
        ({"a": torch.tensor([math.inf])}, {"a": torch.tensor([1.0])}, "a by inf"),
        ({"a": torch.tensor([0.2])}, {"a": torch.tensor([0.0])}, "a by 0.2"),
    ],
)
def test_what_differs_is_named(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_tensors(actual, expected, CLOSE)


def test_a_tolerance_is_a_part_of_the_largest_value():
    expected = {"a": torch.tensor([0.01, 10.0]), "empty": torch.ones(0)}
    assert_same_tensors({"a": torch.tensor([0.5, 10.0]), "empty": torch.ones(0)}, expected, CLOSE)
    assert_same_tensors(expected, expected, EXACT)
    assert largest_difference(expected["empty"], expected["empty"]) == 0.0


def test_differences_are_told_from_the_largest_to_the_tenth():
    expected = {f"t{number:02}": torch.ones(1) for number in range(12)}
    actual = {name: tensor * (2 + number) for number, (name, tensor) in enumerate(expected.items())}
    with pytest.raises(AssertionError, match=r"12 of 12 .*: t11 by 12, t10 by 11, .*, t02 by 3$"):
        assert_same_tensors(actual, expected, CLOSE)


def test_narrower_formats_may_differ_by_more():
    formats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    tolerances = [tolerance_for(dtype).relative for dtype in formats]
    assert tolerances == sorted(tolerances)
    assert all(tolerance >= torch.finfo(dtype).eps for tolerance, dtype in zip(tolerances, formats, strict=True))


def test_the_kits_are_found_by_name_and_nothing_else_is():
    assert booster_testing.PluginConformance.__module__ == "booster_testing.conformance"
    assert booster_testing.PipelineConformance.__module__ == "booster_testing.pipeline_conformance"
    with pytest.raises(AttributeError, match="module 'booster_testing' has no attribute 'Conformance'"):
        _ = booster_testing.Conformance


BEFORE = {"a": torch.tensor([0.5, 4.0]), "b": torch.tensor([[1.0]])}
EXPECTED = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[3.0]])}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda name, each: each * 2, "summed over the ranks, not averaged: factor 2.00"),
        (lambda name, each: each / 2, "divided by the number of ranks once too often: factor 0.50"),
        (lambda name, each: each * 1.25, "multiplied by the same factor: 1.25"),
        (lambda name, each: each * (3 if name == "b" else 1), "only those: b by 3.00"),
        (lambda name, each: each + BEFORE[name], "hold 1.00 times those of the step before: gradients are not reset"),
        (lambda name, each: each + each.abs(), ""),
    ],
)
def test_a_simple_cause_is_told(change, cause):
    actual = {name: change(name, each) for name, each in EXPECTED.items()}
    tolerance = tolerance_for(torch.float32)
    found = probable_cause(actual, EXPECTED, tolerance, 2, BEFORE)
    assert cause in found
    assert bool(found) == bool(cause)
    with pytest.raises(AssertionError, match=f"Gradients of step 2: .*{cause}"):
        assert_same_gradients([BEFORE, actual], [BEFORE, EXPECTED], [tolerance] * 2, 2)


def test_a_gradient_that_a_rank_lacks_is_told():
    with pytest.raises(AssertionError, match="A rank has no gradient of b: one whose own samples"):
        assert_same_gradients([{"a": EXPECTED["a"]}], [EXPECTED], [CLOSE], 2)
