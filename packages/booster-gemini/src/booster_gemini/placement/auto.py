"""Placement within a budget, knowing the future: what is needed last leaves first, and comes back as early as it fits.

Which blocks leave is decided by furthest next use (Belady 1966, "A study of replacement algorithms for a
virtual-storage computer"), as if everything moved at the moment of its use. Then moves are started earlier: a block
leaves as soon as its last use before that is over, and comes as soon as there is room until its use, so that moving
overlaps with computing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from booster_core.errors import BudgetError
from booster_gemini.placement.policy import (
    Kind,
    Moves,
    PlacementPolicy,
    event_bytes,
    largest_working_set,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from booster_gemini.placement.policy import Key, Request

_NEVER = 1 << 60


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
        num = len(request.events)
        if request.budget_bytes is None:
            return [Moves() for _ in range(num + 1)]
        _check(request)
        course = _Course(request)
        course.run()
        evict: dict[int, list[Key]] = defaultdict(list)
        load: dict[int, list[Key]] = defaultdict(list)
        held, budget = course.held, course.budget
        for each in course.evictions:
            held[each.since : each.at] -= request.sizes[each.key]
            evict[each.since].append(each.key)
        for each in course.loads:
            size = request.sizes[each.key]
            tight = np.nonzero(held[each.since : each.at] + size > budget[each.since : each.at])[0]
            start = each.since + int(tight[-1]) + 1 if len(tight) else each.since
            held[start : each.at] += size
            load[start].append(each.key)
        # What the second step's beginning asks for at once is the next plan's business.
        return [*(Moves(tuple(evict[index]), tuple(load[index])) for index in range(num)), Moves()]


def _check(request: Request) -> None:
    """Raise where what is in use at once does not fit."""
    users: dict[Key, int] = {}
    now = 0
    for event, budget in zip(request.events, request.budget_bytes or (), strict=True):
        now += event_bytes(event, users, request.sizes)
        if now > budget:
            largest = largest_working_set(request.events, request.sizes)
            least_bytes, moment = max(now, largest.num_bytes), largest.moment
            msg = (
                f"`memory_budget_bytes={min(request.budget_bytes or ())}` is too small: {moment or 'a step'} needs "
                f"{least_bytes} bytes at once. Pass at least {least_bytes}, or choose smaller chunks."
            )
            raise BudgetError(msg, least_bytes=least_bytes, moment=moment)


@dataclass
class _Move:
    """A block moves for the sake of the event ``at``, and could from the event ``since`` on."""

    key: Key
    at: int
    since: int


class _Course:
    """How two steps in a row go where everything moves when it must; the second shows what the first has to prepare.

    Args:
        request: What is asked for, with a budget.

    Attributes:
        held: Bytes in the compute memory at each event, at most.
        budget: The budget at each event.
        evictions: Blocks that left.
        loads: Blocks that came.
    """

    def __init__(self, request: Request) -> None:
        self._sizes = request.sizes
        self._events = [*request.events, *request.events]
        self.budget = np.array([*(request.budget_bytes or ()), *(request.budget_bytes or ())], dtype=np.int64)
        self.held = np.zeros(len(self._events), dtype=np.int64)
        self.evictions: list[_Move] = []
        self.loads: list[_Move] = []
        self._uses: dict[Key, list[int]] = defaultdict(list)
        for index, event in enumerate(self._events):
            if event.kind is Kind.USE:
                self._uses[event.key].append(index)
        self._present = set(request.resident)
        self._valued = set(request.resident | request.away)
        self._users: dict[Key, int] = defaultdict(int)
        self._idle_since: dict[Key, int] = dict.fromkeys(request.resident, 0)
        self._gone_since: dict[Key, int] = {}
        self._now = sum(self._sizes[key] for key in self._present)

    def run(self) -> None:
        """Go through the events."""
        for index, event in enumerate(self._events):
            if event.kind is Kind.USE:
                self._use(index, event.key)
            elif event.kind is Kind.RESERVE:
                self._make_room(index, event.num_bytes)
                self._now += event.num_bytes
            most = self._now
            if event.kind is Kind.RELEASE:
                self._users[event.key] -= 1
                self._idle_since[event.key] = index + 1
            elif event.kind is Kind.FREE:
                self._now -= event.num_bytes
            elif event.kind is Kind.FORGET:
                self._forget(event.key)
            self._make_room(index, 0)
            self.held[index] = max(most, self._now)

    def _use(self, index: int, key: Key) -> None:
        self._users[key] += 1
        if key in self._present:
            return
        self._make_room(index, self._sizes[key])
        if key in self._valued:
            self.loads.append(_Move(key, index, self._gone_since.get(key, 0)))
        self._present.add(key)
        self._valued.add(key)
        self._now += self._sizes[key]

    def _forget(self, key: Key) -> None:
        self._valued.discard(key)
        if key in self._present:
            self._present.discard(key)
            self._now -= self._sizes[key]

    def _next_use(self, key: Key, index: int) -> int:
        later = self._uses[key]
        position = bisect_right(later, index)
        return later[position] if position < len(later) else _NEVER

    def _make_room(self, index: int, needed: int) -> None:
        if self._now + needed <= self.budget[index]:
            return
        idle = [key for key in self._present if not self._users[key]]
        # The order of a set is nobody's: size and name decide among equals.
        idle.sort(key=lambda key: (self._next_use(key, index), self._sizes[key], str(key)), reverse=True)
        for key in idle:
            if self._now + needed <= self.budget[index]:
                return
            self._present.discard(key)
            self._now -= self._sizes[key]
            self._gone_since[key] = self._idle_since[key]
            self.evictions.append(_Move(key, index, self._idle_since[key]))
