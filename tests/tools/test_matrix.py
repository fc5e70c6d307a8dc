"""The cases that tables of tests mark as slow."""

from __future__ import annotations

import itertools

import pytest
from kit_cases import VariantConformance, by_default, slow_cases
from matrix import covering, matrix, named

from booster_testing.conformance import ArithmeticConformance, PluginConformance

SIZES = [(7, 7), (7, 3), (3, 2, 2), (2, 4, 2, 2), (1, 5)]


def table(sizes):
    return [dict(zip("abcd", values, strict=False)) for values in itertools.product(*map(range, sizes))]


def combinations(case, strength):
    return set(itertools.combinations(sorted(case.items()), strength))


def is_slow(case):
    return any(mark.name == "slow" for mark in case.marks)


def names_of(cases):
    """Return the names of the cases of a table that the default run takes, and of those that are slow."""
    return [case.id for case in cases if not is_slow(case)], [case.id for case in cases if is_slow(case)]


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_choice_has_all_combinations(sizes, strength):
    cases = table(sizes)
    chosen = [cases[position] for position in covering(cases, strength)]
    found = set().union(*(combinations(case, strength) for case in chosen))
    assert found == set().union(*(combinations(case, strength) for case in cases))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_needs_as_many_cases_as_the_longest_parameter_has_values(sizes):
    assert len(covering(table(sizes), 1)) == max(sizes)


def test_pairs_of_three_parameters_need_fewer_cases_than_all():
    assert len(covering(table((3, 2, 2)), 2)) == 6
    assert len(covering(table((3, 3, 3, 3)), 2)) < 81 / 4


def test_values_are_used_about_equally_often():
    chosen = [table((6, 2))[position] for position in covering(table((6, 2)), 1)]
    assert [sum(case["b"] == value for case in chosen) for value in range(2)] == [3, 3]


def test_the_choice_is_the_same_for_the_same_cases():
    assert covering(table((4, 3, 2)), 2) == covering(table((4, 3, 2)), 2)


def test_every_value_is_in_a_default_case():
    mark = matrix(1, name=["ddp", "zero"], how=["eager", "lazy"])
    assert mark.args[0] == ["name", "how"]
    assert [case.values for case in mark.args[1]] == [*itertools.product(["ddp", "zero"], ["eager", "lazy"])]
    assert names_of(mark.args[1]) == (["ddp-eager", "zero-lazy"], ["ddp-lazy", "zero-eager"])


def test_every_pair_of_values_is_in_a_default_case():
    cases = matrix(2, a=[1, 2], b=[1, 2], c=[1, 2]).args[1]
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(case.values[one], case.values[other]) for case in cases if not is_slow(case)}
        assert len(pairs) == 4


def test_named_cases_are_the_default_ones():
    default, slow = names_of(matrix(["zero-True"], name=["ddp", "zero"], lazy=[False, True]).args[1])
    assert default == ["zero-True"]
    assert slow == ["ddp-False", "ddp-True", "zero-False"]


def test_a_case_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"No case is named 'zero-lazy'\. Cases: 'zero-True'"):
        matrix(["zero-lazy"], name=["zero"], lazy=[True])


def test_cases_of_slow_values_are_not_chosen():
    values = ["ddp", pytest.param("zero", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.xfail)]
    cases = matrix(1, name=values, lazy=[False, True]).args[1]
    assert names_of(cases)[0] == ["ddp-False", "fsdp-True"]
    assert [mark.name for case in cases if case.id == "fsdp-True" for mark in case.marks] == ["xfail"]


PLAIN = ["text", 1.5, True, None, len, object()]
NAMES = ["text", "1.5", "True", "None", "len", "value5"]


@matrix(1, **{"place, value": [*enumerate(PLAIN)]})
def test_cases_have_the_names_that_pytest_gives(place, value, request):
    assert request.node.name.endswith(f"[{place}-{NAMES[place]}]")
    assert value is PLAIN[place]


@pytest.mark.parametrize("value", PLAIN)
def test_these_are_the_names_that_pytest_gives(value, request):
    assert request.node.name.endswith(f"[{NAMES[PLAIN.index(value)]}]")


def test_values_of_several_parameters_are_named_one_by_one():
    cases = named([(1, "a"), (2, "b")], "<{}>".format, joint=True)
    assert [(case.values, case.id) for case in cases] == [((1, "a"), "<1>-<a>"), ((2, "b"), "<2>-<b>")]


def test_values_with_marks_are_named_as_others():
    first, second = named([1, pytest.param(2, marks=pytest.mark.slow)], ["one", "two"])
    assert (first.values, first.id, is_slow(first)) == ((1,), "one", False)
    assert (second.values, second.id, is_slow(second)) == ((2,), "two", True)


def marks_of(kit, name):
    return [mark.name for mark in getattr(kit, name).pytestmark]


def test_a_variant_runs_the_arithmetic_by_default():
    assert marks_of(VariantConformance, "test_training_reduces_the_loss") == ["slow"]
    assert VariantConformance.test_loads_at_another_world_size is ArithmeticConformance.test_loads_at_another_world_size
    (loops,) = VariantConformance.test_loop_equals_one_process.pytestmark
    assert names_of(loops.args[1])[0] == ["two losses under no_sync"]
    (whole,) = PluginConformance.test_loop_equals_one_process.pytestmark
    assert len(loops.args[1]) == len(whole.args[1]) > 2


def test_the_kit_itself_has_no_slow_tests():
    for name in dir(PluginConformance):
        marks = getattr(getattr(PluginConformance, name), "pytestmark", [])
        assert "slow" not in [mark.name for mark in marks], name


def test_inherited_tests_are_marked_as_slow():
    @slow_cases("test_clips_by_value", "test_equals_one_process[sgd]")
    class Kit(PluginConformance):
        pass

    assert marks_of(Kit, "test_clips_by_value") == ["slow"]
    assert names_of(Kit.test_equals_one_process.pytestmark[0].args[1]) == (["adamw", "adafactor", "muon"], ["sgd"])
    assert Kit.test_ranks_hold_equal_parameters is PluginConformance.test_ranks_hold_equal_parameters


@pytest.mark.parametrize("name", ["test_what_is_not_there", "test_equals_one_process[lion]", "test_clips_by_value[1]"])
@pytest.mark.parametrize("mark", [by_default, slow_cases])
def test_inherited_tests_that_do_not_exist_are_an_error(mark, name):
    with pytest.raises(ValueError, match=r"^Kit has no test_"):
        mark(name)(type("Kit", (PluginConformance,), {}))
