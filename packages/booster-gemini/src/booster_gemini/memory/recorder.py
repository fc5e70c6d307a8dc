"""The record of a step, the plan that is made of it, and where in the plan the present step is."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from booster_gemini.placement.policy import Event, Kind, Moves, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from booster_gemini.placement.policy import Key, PlacementPolicy

_WINDOW = 16
"""How far ahead an event is looked for that did not come when it was expected."""


class StepRecorder:
    """Records steps and follows plans.

    Args:
        policy: Makes the plans.

    Attributes:
        moment: What the model is doing.
        num_unplanned: How many events of the last step were not expected.
        is_settled: Whether the last step was as the one before.
    """

    def __init__(self, policy: PlacementPolicy) -> None:
        self.moment = ""
        self.num_unplanned = 0
        self.is_settled = False
        self._policy = policy
        self._events: list[Event] = []
        self._plan: Sequence[Moves] = ()
        self._expected: Sequence[Event] = ()
        self._position = 0
        self._unplanned = 0
        self._uses: dict[Key, list[int]] = {}
        self._plans: dict[object, Sequence[Moves]] = {}

    @property
    def has_plan(self) -> bool:
        """Whether the present step follows a plan."""
        return bool(self._plan)

    def note(self, event: Event, *, is_planned: bool) -> list[Moves]:
        """Note an event that is about to happen, and return the moves that are due before it.

        Args:
            event: What happens.
            is_planned: Whether it concerns the memory that is planned.
        """
        if not is_planned:
            return []
        self._events.append(Event(event.kind, event.key, event.num_bytes, self.moment))
        if not self._plan:
            return []
        window = range(self._position, min(self._position + _WINDOW, len(self._expected)))
        found = next((index for index in window if self._expected[index].is_like(event)), None)
        if found is None:
            self._unplanned += 1
            return []
        due = list(self._plan[self._position : found + 1])
        self._position = found + 1
        return due

    def soonness(self, otherwise: Callable[[Any], int]) -> Callable[[Any], Any]:
        """Return a key by which blocks are sorted so that the one needed last comes first."""
        if not self._plan:
            return otherwise
        position, length = self._position, max(len(self._expected), 1)

        def distance(block: Any) -> Any:
            uses = self._uses.get(block.key, [])
            later = next((index for index in uses if index >= position), None)
            if later is None:
                later = uses[0] + length if uses else 3 * length
            return -later

        return distance

    def finish(self) -> Sequence[Moves]:
        """Return what the plan has left at the end of a step: who leaves; nobody comes for events that did not."""
        return [Moves(evict=moves.evict) for moves in self._plan[self._position :]]

    def end_step(
        self,
        sizes: Mapping[Key, int],
        resident: frozenset[Key],
        away: frozenset[Key],
        budget_bytes: int | None,
        staying: frozenset[Key] = frozenset(),
    ) -> Moves:
        """Make a plan for the next step, which is expected to be as this one was, and return what it begins with.

        Args:
            sizes: Sizes of the blocks that are planned, in bytes.
            resident: Those that are there now.
            away: Those that have values in another memory.
            budget_bytes: What they and reserved memory may take.
            staying: Those that are there for good; see `Request`.

        Raises:
            BudgetError: If the budget can't hold what was in use at once.
        """
        # Blocks may have been given up meanwhile, as when everything is laid out again after the first backward.
        events = [event for event in self._events if event.key is None or event.key in sizes]
        self._events = []
        self.num_unplanned, self._unplanned = self._unplanned, 0
        is_same = len(events) == len(self._expected) and all(map(Event.is_like, events, self._expected))
        self.is_settled = is_same
        if not is_same:
            self._plans.clear()
            self._expected = events
            self._uses = defaultdict(list)
            for index, event in enumerate(events):
                if event.kind is Kind.USE:
                    self._uses[event.key].append(index)
        state = (resident, away, staying)
        if state not in self._plans:
            if len(self._plans) > _WINDOW:
                self._plans.clear()
            self._plan = ()  # also where no other is found
            budget = None if budget_bytes is None else [budget_bytes] * len(events)
            asked = Request(
                events=events, sizes=sizes, resident=resident, away=away, budget_bytes=budget, staying=staying
            )
            self._plans[state] = self._policy.plan(asked)
        first, *rest = self._plans[state] or (Moves(),)
        self._plan = [Moves(), *rest]
        self._position = 0
        return first
