"""Tables of cases that mark their own surplus: what the default run does not take gets `slow`."""

import itertools
from collections import Counter

import pytest

_Case = type(pytest.param())


def matrix(default, nightly=0, /, **axes):
    """Parametrize a test by the product of axes, and mark as slow what the default run does not take.

    Cases are named as those of one `pytest.mark.parametrize` for each axis, the first axis nearest to the function.

    Args:
        default: 1 takes cases that together have every value, 2 every pair of values of different parameters. Where
            these are still too many, the names of the cases.
        nightly: What is left of the others, which are slow: 1 and 2 as for ``default``, 0 for all of them.
        axes: The values of each parameter; `pytest.param` gives a value a name or marks. Cases of a value that is
            marked slow are slow. Values of several parameters are tuples: ``**{"height, width": [(2, 3)]}``.

    Raises:
        ValueError: If no case has one of the names.
    """
    parameters = [[each.strip() for each in names.split(",")] for names in axes]
    tables = [_named(names, values) for names, values in zip(parameters, axes.values(), strict=True)]
    cases = [_joined(parts) for parts in itertools.product(*tables)]
    candidates = [position for position, case in enumerate(cases) if not _is_slow(case)]
    if isinstance(default, int):
        # A value is the same object in all its cases, and need not be hashable.
        values = [dict(enumerate(map(id, cases[position].values))) for position in candidates]
        chosen = {candidates[each] for each in covering(values, default)}
    else:
        ids = [case.id for case in cases]
        if unknown := [name for name in default if name not in ids]:
            msg = f"No case is named {', '.join(map(repr, unknown))}. Cases: {', '.join(map(repr, ids))}."
            raise ValueError(msg)
        chosen = {position for position in candidates if ids[position] in default}
    kept = set(range(len(cases)))
    if nightly:
        kept = chosen | covering([dict(enumerate(map(id, case.values))) for case in cases], nightly)
    marked = [cases[each] if each in chosen else _slow(cases[each]) for each in sorted(kept)]
    return pytest.mark.parametrize([name for names in parameters for name in names], marked)


def named(values, ids, *, joint=False):
    """Return the values of an axis with names, which are given as `pytest.mark.parametrize` takes ``ids``.

    Args:
        values: Values of one parameter, or tuples of values of several.
        ids: A name for each, or a function of the value of a parameter.
        joint: Whether values are tuples of several parameters.
    """
    cases = [_case(each, joint=joint) for each in values]
    names = ["-".join(map(ids, case.values)) for case in cases] if callable(ids) else ids
    return [pytest.param(*case.values, marks=case.marks, id=name) for case, name in zip(cases, names, strict=True)]


def case_names(parameters, values):
    """Return the names that pytest gives the cases of ``pytest.mark.parametrize(parameters, values)``."""
    return [case.id for case in _named([each.strip() for each in parameters.split(",")], values)]


def covering(cases, strength):
    """Return the positions of cases that together have all combinations of ``strength`` parameters that any has.

    Greedy, and the same for the same cases: each choice adds the most combinations, with values used least so far
    where several add as many.

    Args:
        cases: The parameters of each case by name; values are hashable.
        strength: 1 to take every value, 2 to take every pair of values.
    """
    combinations = [set(itertools.combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing = set().union(*combinations)
    used = Counter()
    chosen = set()

    def gain(position):
        uses = sum(used[item] for item in cases[position].items())
        return len(combinations[position] & missing), -uses, -position

    while missing:
        best = max((position for position in range(len(cases)) if position not in chosen), key=gain)
        chosen.add(best)
        missing -= combinations[best]
        used.update(cases[best].items())
    return chosen


def _case(value, *, joint):
    if isinstance(value, _Case):
        return value
    return pytest.param(*value) if joint else pytest.param(value)


def _named(parameters, values):
    """Return the values of an axis with the names that pytest would give them."""
    found = []
    for place, value in enumerate(values):
        case = _case(value, joint=len(parameters) > 1)
        parts = [_name(each, f"{name}{place}") for name, each in zip(parameters, case.values, strict=True)]
        found.append(pytest.param(*case.values, marks=case.marks, id=case.id or "-".join(parts)))
    return found


def _joined(parts):
    """Return the case that has these values, one of each axis, with their marks and names."""
    marks = [mark for part in parts for mark in part.marks]
    return pytest.param(
        *(each for part in parts for each in part.values), marks=marks, id="-".join(p.id for p in parts)
    )


def _name(value, otherwise):
    """Return the name that pytest gives a value of a parameter."""
    if isinstance(value, (str, int, float)) or value is None:
        return str(value)
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else otherwise


def _is_slow(case):
    return any(mark.name == "slow" for mark in case.marks)


def _slow(case):
    return case if _is_slow(case) else pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
