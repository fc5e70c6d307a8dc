"""The choice of the cases that the default run takes of a matrix."""

from __future__ import annotations

import itertools

import pytest
from covering import covering

SIZES = [(7, 7), (7, 3), (3, 2, 2), (2, 4, 2, 2), (1, 5)]


def matrix(sizes):
    return [dict(zip("abcd", values, strict=False)) for values in itertools.product(*map(range, sizes))]


def combinations(case, strength):
    return set(itertools.combinations(sorted(case.items()), strength))


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_choice_has_all_combinations(sizes, strength):
    cases = matrix(sizes)
    chosen = [cases[position] for position in covering(cases, strength)]
    found = set().union(*(combinations(case, strength) for case in chosen))
    assert found == set().union(*(combinations(case, strength) for case in cases))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_needs_as_many_cases_as_the_longest_parameter_has_values(sizes):
    assert len(covering(matrix(sizes), 1)) == max(sizes)


def test_pairs_of_three_parameters_need_fewer_cases_than_all():
    assert len(covering(matrix((3, 2, 2)), 2)) == 6
    assert len(covering(matrix((3, 3, 3, 3)), 2)) < 81 / 4


def test_values_are_used_about_equally_often():
    chosen = [matrix((6, 2))[position] for position in covering(matrix((6, 2)), 1)]
    assert [sum(case["b"] == value for case in chosen) for value in range(2)] == [3, 3]


def test_the_choice_is_the_same_for_the_same_cases():
    assert covering(matrix((4, 3, 2)), 2) == covering(matrix((4, 3, 2)), 2)
