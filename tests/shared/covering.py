"""Choose the cases of a large matrix that the default run takes; the others are slow."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def covering(cases: Sequence[Mapping[str, Any]], strength: int) -> set[int]:
    """Return the positions of cases that together have all combinations of ``strength`` parameters that any has.

    Greedy, and the same for the same cases: each choice adds the most combinations, with values used least so far
    where several add as many.

    Args:
        cases: The parameters of each case by name; values are hashable.
        strength: 1 to take every value, 2 to take every pair of values.
    """
    combinations = [set(itertools.combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing = set().union(*combinations)
    used: Counter[tuple[str, Any]] = Counter()
    chosen: set[int] = set()

    def gain(position: int) -> tuple[int, int, int]:
        uses = sum(used[item] for item in cases[position].items())
        return len(combinations[position] & missing), -uses, -position

    while missing:
        best = max((position for position in range(len(cases)) if position not in chosen), key=gain)
        chosen.add(best)
        missing -= combinations[best]
        used.update(cases[best].items())
    return chosen
