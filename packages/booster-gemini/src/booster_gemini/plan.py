"""When blocks come and go: one plan for a step, made from the uses that the last step had.

A step is a list of events about blocks that have a key and a size; a plan says which blocks leave and which come before
each event. Nothing here knows of tensors, files or ranks.

Within a budget, nothing leaves before its room is needed: then it is the block whose next use is furthest away (Belady
1966, "A study of replacement algorithms for a virtual-storage computer"). Blocks come a few uses ahead of their own, so
that moving overlaps with computing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from booster_core.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from booster_zero.engine import Key, Role

_WINDOW = 16
"""How far ahead an event is looked for that did not come when it was expected; and how many plans are kept."""


class Event(NamedTuple):
    """One event of a step.

    Attributes:
        key: The block; ``None`` for memory that is taken for something else, such as a gathered chunk.
        change: Of a block: its use begins (1) or ends (-1), or its values are given up (0). Of other memory: bytes that
            are taken, or given back where negative.
        moment: What the model is doing, such as a module's name; for messages.
    """

    key: Key | None
    change: int
    moment: str = ""


class Moves(NamedTuple):
    """What is started before an event: first blocks leave, then others come."""

    leave: list[Key]
    come: list[Key]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Decides which blocks stay where they are computed with, and when the others come and go.

    Args:
        away: Without a budget, the fraction of each role's bytes that is away while not in use, between 0 and 1. The
            blocks that are away are spread evenly, so that moving one overlaps with using others.
        ahead: How many blocks of its role before its own use a block comes; 0 is at its use.
        budget_bytes: What blocks and other memory may take together; the blocks that are needed soonest stay.
    """

    away: Mapping[Role, float] = field(default_factory=dict)
    ahead: Mapping[Role, int] = field(default_factory=dict)
    budget_bytes: int | None = None

    def leaving(self, sizes: Mapping[Key, int]) -> set[Key]:
        """Return the blocks that leave after each use; none within a budget, where they leave when room is needed.

        Args:
            sizes: Sizes of all blocks, in the order in which they were made.
        """
        found, before = set(), defaultdict[object, int](int)
        for key, size in sizes.items() if self.budget_bytes is None else ():
            role, fraction = key[1], self.away.get(key[1], 0.0)
            start, before[role] = before[role], before[role] + size
            # The middles of those that are away cut the bytes into even steps.
            if size and int(before[role] * fraction / size + 0.5) > int(start * fraction / size + 0.5):
                found.add(key)
        return found

    def plan(
        self,
        events: Sequence[Event],
        sizes: Mapping[Key, int],
        here: Iterable[Key],
        below: Iterable[Key],
        fixed: Iterable[Key] = (),
    ) -> list[Moves]:
        """Return what moves before each event of a step, and what after the last.

        A block that is needed and not there comes then, without a plan; a plan only makes that rare.

        Args:
            events: The last step; the next one is expected to be the same.
            sizes: Size of every block, in bytes.
            here: The blocks that are where they are computed with when the step begins. A budget asks neither this nor
                the next: each block is to come before its use, if it is not there.
            below: The blocks that have values in another memory.
            fixed: Blocks that stay unless a budget moves them, such as state that is stepped on where it is.

        Raises:
            BudgetError: If the budget can't hold what is in use at once.
        """
        plan = [Moves([], []) for _ in range(len(events) + 1)]
        starts = self._starts(events)
        if self.budget_bytes is not None:
            _check_working_set(events, sizes, self.budget_bytes)
            for start, key in ((start, events[index].key) for index, start in starts.items()):
                plan[start].come.append(key)  # type: ignore[arg-type] # a use is of a block
            return plan
        self._plan_fractions(plan, starts, events, sizes, set(here), set(below), set(fixed))
        return plan

    def _plan_fractions(
        self,
        plan: list[Moves],
        starts: Mapping[int, int],
        events: Sequence[Event],
        sizes: Mapping[Key, int],
        present: set[Key],
        below: set[Key],
        fixed: set[Key],
    ) -> None:
        """Let blocks that are away come before their uses, and leave after them unless they would come at once."""
        away, valued = self.leaving(sizes) - fixed, present | below
        users = dict.fromkeys(sizes, 0)
        idle_since = {key: 0 for key in present if key in away}
        for index, (key, change, _) in enumerate(events):
            if key is None:
                continue
            users[key] += change
            if change > 0:
                since = idle_since.pop(key, None)
                if since is not None and since < starts[index]:  # else it would come back as soon as it is gone
                    plan[since].leave.append(key)
                    present.discard(key)
                if key not in present and key in valued:
                    plan[starts[index]].come.append(key)
                present.add(key)
                valued.add(key)
            elif change == 0:
                idle_since.pop(key, None)
                present.discard(key)
                valued.discard(key)
            elif not users[key] and key in away:
                idle_since[key] = index + 1
        for key, since in idle_since.items():
            plan[since].leave.append(key)

    def _starts(self, events: Sequence[Event]) -> dict[int, int]:
        """Return for each use the event before which its block comes."""
        runs: dict[Role, list[tuple[Key, int]]] = defaultdict(list)
        starts = {}
        for index, (key, change, _) in enumerate(events):
            if key is not None and change > 0:
                of_role, ahead = runs[key[1]], self.ahead.get(key[1], 0)
                if not of_role or of_role[-1][0] != key:  # a block's uses in a row, as in a step, are one
                    of_role.append((key, index))
                starts[index] = of_role[max(0, len(of_role) - 1 - ahead)][1] if ahead else index
        return starts


def _check_working_set(events: Sequence[Event], sizes: Mapping[Key, int], budget: int) -> None:
    """Raise where what is in use at once does not fit."""
    users = dict.fromkeys(sizes, 0)
    now, most, moment = 0, budget, ""
    for key, change, doing in events:
        if key is None:
            now += change
        else:
            before, users[key] = users[key], users[key] + change
            now += sizes[key] * ((users[key] > 0) - (before > 0))
        if now > most:
            most, moment = now, doing
    if most > budget:
        msg = (
            f"`memory_budget_bytes={budget}` is too small: {moment or 'a step'} needs {most} bytes at once. Pass at "
            f"least {most}, or choose smaller chunks."
        )
        raise BudgetError(msg, least_bytes=most, moment=moment)


class Schedule:
    """The events of the present step, and where in the plan they are.

    Args:
        placement: Makes plans.

    Attributes:
        moment: What the model is doing.
        is_settled: Whether the last step was as the one before.
    """

    def __init__(self, placement: Placement) -> None:
        self.moment = ""
        self.is_settled = False
        self._placement = placement
        self._events: list[Event] = []
        self._expected: list[Event] = []
        self._plan: Sequence[Moves] = ()
        self._plans: dict[object, list[Moves]] = {}
        self._position = 0
        self._uses: dict[Key, list[int]] = {}

    def note(self, key: Key | None, change: int) -> Sequence[Moves] | None:
        """Note an event that is about to happen, and return the moves due before it; ``None`` where no plan has it."""
        self._events.append(Event(key, change, self.moment))
        if not self._plan:
            return None
        start = self._position
        for found, expected in enumerate(self._expected[start : start + _WINDOW], start):
            if expected[:2] == (key, change):
                self._position = found + 1
                return self._plan[start : found + 1]
        return None

    def next_use(self, key: Key) -> int:
        """Return when a block is expected to be used next: the larger, the later."""
        uses, length = self._uses.get(key), max(len(self._expected), 1)
        if not uses:
            return 3 * length
        position = bisect_left(uses, self._position)
        return uses[position] if position < len(uses) else uses[0] + length

    def finish(self) -> Sequence[Moves]:
        """Return what the plan has left at the end of a step: who leaves; nobody comes for events that did not."""
        return [Moves(moves.leave, []) for moves in self._plan[self._position :]]

    def end_step(
        self, sizes: Mapping[Key, int], here: frozenset[Key], below: frozenset[Key], fixed: frozenset[Key]
    ) -> Moves:
        """Make a plan for the next step, and return what it begins with; see `Placement.plan`.

        Raises:
            BudgetError: If the budget can't hold what was in use at once.
        """
        # Blocks may have been given up meanwhile, as when an optimizer lists parameters that had other chunks.
        events = [event for event in self._events if event.key is None or event.key in sizes]
        self._events = []
        self.is_settled = [event[:2] for event in events] == [event[:2] for event in self._expected]
        if not self.is_settled:
            self._plans.clear()
            self._expected, self._uses = events, defaultdict(list)
            for index, (key, change, _) in enumerate(events):
                if key is not None and change > 0:
                    self._uses[key].append(index)
        state = here, below, fixed
        if state not in self._plans:
            if len(self._plans) > _WINDOW:
                self._plans.clear()
            self._plan = ()  # also where no other is found
            self._plans[state] = self._placement.plan(events, sizes, here, below, fixed)
        first, *rest = self._plans[state]
        self._plan, self._position = [Moves([], []), *rest], 0
        return first
