"""Mark inherited tests of the conformance kit as slow, in classes that need only some of them by default."""

import functools

import pytest
from matrix import case_names, matrix

from booster_testing.conformance import ArithmeticConformance


def by_default(*kept):
    """Return a class decorator that marks all inherited tests as slow but some.

    Args:
        kept: Tests, as ``name`` or ``name[case]``.

    Raises:
        ValueError: If the decorated class has no such test.
    """
    return lambda kit: _mark(kit, set(kept))


def slow_cases(*slow):
    """Return a class decorator that marks inherited tests as slow, given as ``name`` or ``name[case]``.

    Raises:
        ValueError: If the decorated class has no such test.
    """
    return lambda kit: _mark(kit, _names(kit).difference(_spelled_out(kit, slow)))


def _mark(kit, kept):
    kept = _spelled_out(kit, kept)
    for name, cases in _cases(kit).items():
        wanted = [case for case in cases if f"{name}[{case}]" in kept]
        if name not in kept and (not cases or wanted != cases):
            setattr(kit, name, _marked(getattr(kit, name), wanted))
    return kit


def _marked(test, wanted):
    """Return a copy of a test that is slow, or whose cases are, but the wanted ones."""

    @functools.wraps(test)
    def copy(*arguments, **named):
        test(*arguments, **named)

    marks = getattr(test, "pytestmark", [])
    if wanted:
        (table,) = (mark for mark in marks if mark.name == "parametrize")
        parameters, values = _table(table)
        copy.pytestmark = [matrix(wanted, **{parameters: values}).mark, *(mark for mark in marks if mark is not table)]
    else:
        copy.pytestmark = [pytest.mark.slow.mark, *marks]
    return copy


def _cases(kit):
    """Return the names of the cases of each test; none for a test that has no parameters."""
    found = {}
    for name in dir(kit):
        if name.startswith("test_"):
            tables = [mark for mark in getattr(getattr(kit, name), "pytestmark", []) if mark.name == "parametrize"]
            found[name] = [case for table in tables for case in case_names(*_table(table))]
    return found


def _table(mark):
    parameters, values = mark.args
    return parameters if isinstance(parameters, str) else ", ".join(parameters), [*values]


def _names(kit):
    """Return the names of all tests, with those of cases."""
    return {f"{name}[{case}]" if case else name for name, cases in _cases(kit).items() for case in cases or [""]}


def _spelled_out(kit, names):
    """Return the names of tests, or of their cases where they have some."""
    cases = _cases(kit)
    found = {f"{name}[{case}]" if case else name for name in names for case in cases.get(name) or [""]}
    if unknown := sorted(found - _names(kit)):
        msg = f"{kit.__name__} has no {', '.join(unknown)}."
        raise ValueError(msg)
    return found


@slow_cases(
    "test_boost_makes_ranks_equal_or_raises",
    "test_checkpoint_of_one_device_loads",
    "test_clips_by_the_global_norm[0.05-1.0]",
    "test_equals_one_process[sgd]",
    "test_loop_equals_one_process[evaluation between]",
    "test_low_precision_equals_one_process[bf16]",
    "test_overflow_on_one_rank_skips_the_step_on_all_ranks",
    "test_ranks_hold_equal_parameters",
)
class VariantConformance(ArithmeticConformance):
    """What options of memory and communication can change, values and where they are, for a variant of a plugin.

    Another class runs the whole kit for the plugin. What another of these tests would find as well, such as replicas
    that differ, is slow.
    """
