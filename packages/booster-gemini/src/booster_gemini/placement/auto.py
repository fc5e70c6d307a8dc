"""Placement within a budget, knowing the future: what is needed last leaves first, and comes back as early as it fits.

Which blocks leave is decided by furthest next use (Belady 1966, "A study of replacement algorithms for a virtual-storage
computer"), as if everything moved at the moment of its use. Then moves are started earlier: a block leaves as soon as
its last use before that is over, and comes as soon as there is room until its use, so that moving overlaps with
computing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from booster_core.errors import ConfigError
from booster_gemini.placement.policy import Kind, Moves, PlacementPolicy, largest_working_set

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from booster_gemini.placement.policy import Event, Key, Request

_NEVER = 1 << 60


class BudgetError(ConfigError):
    """A memory budget is smaller than what is in use at once.

    Attributes:
        least_bytes: The least budget that would do.
        moment: What the model is doing when it needs that much.
    """

    def __init__(self, budget_bytes: int, least_bytes: int, moment: str) -> None:
        self.least_bytes, self.moment = least_bytes, moment
        super().__init__(
            f"`memory_budget_bytes={budget_bytes}` is too small: {moment or 'a step'} needs {least_bytes} bytes at once. "
            f"Pass at least {least_bytes}, or choose smaller chunks."
        )


class AutoPlacement(PlacementPolicy):
    """Keeps as many blocks in the compute memory as its budget holds, those that are needed soonest."""

    def may_stay(self, key: Key, sizes: Mapping[Key, int]) -> bool:
        """Return ``True``: a block leaves when room is needed."""
        del key, sizes
        return True

    def plan(self, request: Request) -> Sequence[Moves]:
        """Return moves for a step; the following step is taken to be the same.

        Raises:
            BudgetError: If the budget can't hold what is in use at once.
        """
        if request.budget_bytes is None:
            return [Moves() for _ in range(len(request.events) + 1)]
        _check(request)
        num = len(request.events)
        # Twice the step, so that its end prepares the next one's beginning.
        events = [*request.events, *request.events]
        budget = np.array([*request.budget_bytes, *request.budget_bytes], dtype=np.int64)
        course = _replace_furthest(events, request, budget)
        evict: dict[int, list[Key]] = defaultdict(list)
        load: dict[int, list[Key]] = defaultdict(list)
        held = course.held
        for each in course.evictions:
            held[each.since : each.at] -= request.sizes[each.key]
            evict[each.since].append(each.key)
        for each in course.loads:
            size = request.sizes[each.key]
            tight = np.nonzero(held[each.since : each.at] + size > budget[each.since : each.at])[0]
            start = each.since + int(tight[-1]) + 1 if len(tight) else each.since
            held[start : each.at] += size
            load[start].append(each.key)
        # What the second round prepares for a third is the first round's business again.
        return [Moves(tuple(evict[index]), tuple(load[index])) for index in range(num + 1)]


@dataclass
class _Move:
    """A block moves for the sake of the event ``at``, and could from the event ``since`` on."""

    key: Key
    at: int
    since: int


@dataclass
class _Course:
    """How a step goes where everything moves when it must.

    Args:
        held: Bytes in the compute memory at each event, at most.
        evictions: Blocks that left.
        loads: Blocks that came.
    """

    held: np.ndarray
    evictions: list[_Move] = field(default_factory=list)
    loads: list[_Move] = field(default_factory=list)


def _check(request: Request) -> None:
    assert request.budget_bytes is not None
    users: dict[Key, int] = {}
    now = 0
    from booster_gemini.placement.policy import event_bytes

    for event, budget in zip(request.events, request.budget_bytes, strict=True):
        now += event_bytes(event, users, request.sizes)
        if now > budget:
            largest = largest_working_set(request.events, request.sizes)
            raise BudgetError(min(request.budget_bytes), max(now, largest.num_bytes), largest.moment)


def _replace_furthest(events: Sequence[Event], request: Request, budget: np.ndarray) -> _Course:
    sizes = request.sizes
    uses: dict[Key, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        if event.kind is Kind.USE:
            uses[event.key].append(index)
    course = _Course(np.zeros(len(events), dtype=np.int64))
    present = set(request.resident)
    has_values = set(request.resident | request.away)
    users: dict[Key, int] = defaultdict(int)
    idle_since: dict[Key, int] = dict.fromkeys(present, 0)
    gone_since: dict[Key, int] = {}
    held = sum(sizes[key] for key in present)

    def next_use(key: Key, index: int) -> int:
        later = uses[key]
        position = bisect_right(later, index)
        return later[position] if position < len(later) else _NEVER

    def make_room(index: int, needed: int) -> None:
        nonlocal held
        if held + needed <= budget[index]:
            return
        idle = sorted(
            (key for key in present if not users[key]), key=lambda key: (next_use(key, index), sizes[key]), reverse=True
        )
        for key in idle:
            if held + needed <= budget[index]:
                return
            present.discard(key)
            held -= sizes[key]
            gone_since[key] = idle_since[key]
            course.evictions.append(_Move(key, index, idle_since[key]))

    for index, event in enumerate(events):
        key = event.key
        if event.kind is Kind.USE:
            users[key] += 1
            if key not in present:
                make_room(index, sizes[key])
                if key in has_values:
                    course.loads.append(_Move(key, index, gone_since.get(key, 0)))
                present.add(key)
                has_values.add(key)
                held += sizes[key]
        elif event.kind is Kind.RESERVE:
            make_room(index, event.num_bytes)
            held += event.num_bytes
        before = held
        if event.kind is Kind.RELEASE:
            users[key] -= 1
            idle_since[key] = index + 1
        elif event.kind is Kind.FREE:
            held -= event.num_bytes
        elif event.kind is Kind.FORGET:
            has_values.discard(key)
            if key in present:
                present.discard(key)
                held -= sizes[key]
        make_room(index, 0)
        course.held[index] = max(before, held)
    return course
