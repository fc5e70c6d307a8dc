"""A schedule is a list of actions for each rank; it is made and checked without ranks.

A model is cut into *stages*. A rank holds one or several of them, its *chunks*; a *microbatch* passes through all
stages forward and back. A schedule decides in which order each rank does what it has to do: in the order of a paper, or
(for the zero-bubble V) as found by letting the ranks work through one batch in thought, each taking up, whenever it is
free, what is preferred among what is ready.

References: GPipe (Huang et al. 2019, arXiv:1811.06965); 1F1B (Narayanan et al. 2019, "PipeDream", and 2021,
arXiv:2104.04473, for the interleaved form); the zero-bubble V (Qi et al. 2024, arXiv:2405.15362).
"""

from __future__ import annotations

import enum
import functools
import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STYLES = ("gpipe", "1f1b", "interleaved", "zbv")
ZERO_BUBBLE = "zbv"
"""The style that splits backward, and whose stages run through the ranks and back."""


class ActionKind(enum.Enum):
    """What a rank does with one microbatch in one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs and weights, at once."""
    BACKWARD_INPUT = "backward_input"
    """Gradients of the stage's inputs, which the stage before waits for."""
    BACKWARD_WEIGHT = "backward_weight"
    """Gradients of the stage's weights, which nobody waits for."""

    __hash__ = object.__hash__  # by identity: that of enumerations runs Python code, and plans hash a lot


COSTS: Mapping[ActionKind, int] = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 1,
}
"""How long each takes, for one stage, in the time of a forward: gradients cost two products for each of forward's."""


class Action(NamedTuple):
    """One piece of work.

    Attributes:
        work: What to do.
        stage: In which stage of the whole model.
        microbatch: With which part of the batch.
    """

    work: ActionKind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Placement:
    """Which rank has which stages.

    Args:
        num_ranks: Ranks of the pipeline.
        num_chunks: Stages that each rank holds.
        is_v: Whether every other chunk runs through the ranks backwards, so that the first rank holds the last stage.
    """

    num_ranks: int
    num_chunks: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        chunk, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.is_v and chunk % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in their order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]


class Event(NamedTuple):
    """An action with its time in the plan, in units of `COSTS`."""

    action: Action
    start: int
    stop: int


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one batch, in which order.

    Args:
        placement: Which rank has which stages.
        num_microbatches: Parts of the batch.
        events: Each rank's actions, with the times that they have if all work takes as long as `COSTS` says.
    """

    placement: Placement
    num_microbatches: int
    events: Sequence[Sequence[Event]] = field(repr=False)

    def actions(self, rank: int) -> list[Action]:
        """Return a rank's actions in their order."""
        return [*self._orders[rank]]

    @functools.cached_property
    def _orders(self) -> list[list[Action]]:
        return [[event.action for event in events] for events in self.events]

    @functools.cached_property
    def is_split(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return any(event.action.work is ActionKind.BACKWARD_WEIGHT for event in self.events[0])

    @property
    def duration(self) -> int:
        """Time of the batch, in the time of one stage's forward."""
        return max(event.stop for events in self.events for event in events)

    def idle_share(self, rank: int) -> float:
        """Return which part of the batch's time a rank has nothing to do."""
        busy = sum(event.stop - event.start for event in self.events[rank])
        return 1.0 - busy / self.duration

    def peak_live(self, rank: int) -> int:
        """Return the largest number of forwards whose activations a rank keeps for backward at one time."""
        live = peak = 0
        for event in self.events[rank]:
            if event.action.work is ActionKind.FORWARD:
                live += 1
                peak = max(peak, live)
            elif event.action.work in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                live -= 1
        return peak


@functools.lru_cache(maxsize=16)
def make_schedule(style: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule of a style.

    Args:
        style: One of `STYLES`.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Parts of each batch.
        num_chunks: Stages on each rank; 1 but for ``"interleaved"``, where it is at least 2, and ``"zbv"``, where it
            is 2.

    Raises:
        ConfigError: If the style is unknown, or does not go with the number of chunks.
    """
    if style not in STYLES:
        msg = f"`pp_style={style!r}` is not one of {', '.join(map(repr, STYLES))}."
        raise ConfigError(msg)
    low, high = {"interleaved": (2, None), ZERO_BUBBLE: (2, 2)}.get(style, (1, 1))
    if num_chunks < low or (high is not None and num_chunks > high):
        many = f"{low}" if high == low else f"at least {low}"
        msg = f"`pp_style={style!r}` puts {many} stage(s) on each rank, but `num_model_chunks={num_chunks}`."
        raise ConfigError(msg)
    placement = Placement(num_ranks, num_chunks, is_v=style == ZERO_BUBBLE)
    if style == ZERO_BUBBLE:
        return _Planner(placement, num_microbatches).run()
    orders = [_in_turns(style, placement, num_microbatches, rank) for rank in range(num_ranks)]
    return _timed(placement, num_microbatches, orders)


def _in_turns(style: str, placement: Placement, count: int, rank: int) -> list[Action]:
    """Return what a rank does: forwards to warm up, then forward and backward by turns, and the backwards left.

    As many microbatches as there are ranks pass through a chunk before the next chunk's turn. A last group of fewer
    can't take turns all the way, so that a full one is listed, and cut.
    """
    ranks, chunks = placement.num_ranks, placement.num_chunks
    full = count if chunks == 1 else -(-count // ranks) * ranks
    order = [
        (chunk * ranks + rank, microbatch)
        for first in range(0, full, ranks)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + ranks, full))
    ]
    forwards = [Action(ActionKind.FORWARD, *each) for each in order]
    ends = (chunks - 1) * ranks + 2 * rank
    backwards = [Action(ActionKind.BACKWARD, ends - stage, microbatch) for stage, microbatch in order]
    warm_up = {"gpipe": full, "1f1b": ranks - rank - 1}.get(style, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    actions = forwards[:warm_up]
    for turn in itertools.zip_longest(forwards[warm_up:], backwards):
        actions += [each for each in turn if each is not None]
    return [each for each in actions if each.microbatch < count]


def _timed(placement: Placement, count: int, orders: Sequence[Sequence[Action]]) -> Schedule:
    """Return the schedule of ranks that do their actions in a given order, each as early as that lets it be."""
    last = placement.num_stages - 1
    forward: dict[tuple[int, int], int] = {(-1, microbatch): 0 for microbatch in range(count)}
    backward: dict[tuple[int, int], int] = {}
    events: list[list[Event]] = [[] for _ in orders]
    places, free = [0] * len(orders), [0] * len(orders)
    num_left = sum(map(len, orders))
    while num_left:
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                work, stage, microbatch = action
                ready: int | None = 0
                if work is ActionKind.FORWARD:
                    ready = forward.get((stage - 1, microbatch))
                else:
                    ready = forward.get((last, microbatch)) if stage == last else backward.get((stage + 1, microbatch))
                if ready is None:
                    break
                start = max(ready, free[rank])
                free[rank] = start + COSTS[work]
                (forward if work is ActionKind.FORWARD else backward)[stage, microbatch] = free[rank]
                events[rank].append(Event(action, start, free[rank]))
                places[rank] += 1
                num_left -= 1
    return Schedule(placement, count, events)


class _Worker:
    """What a rank has still to do, and what of it is ready.

    Args:
        actions: All that it has to do, the preferred first.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._place = {action: place for place, action in enumerate(actions)}
        self._ready: dict[ActionKind, list[tuple[int, Action]]] = {work: [] for work in ActionKind}
        self.num_left = len(actions)
        self.free_at = 0
        self.live = 0
        self.events: list[Event] = []

    def add(self, action: Action) -> None:
        """Tell that nothing is missing for an action any more."""
        # Places differ, so that no two actions are compared.
        heapq.heappush(self._ready[action.work], (self._place[action], action))

    def first(self, work: ActionKind) -> Action | None:
        """Return the preferred one of the actions of a kind that are ready."""
        ready = self._ready[work]
        return ready[0][1] if ready else None

    def take(self, action: Action, now: int) -> int:
        """Do the preferred action of a kind; return when it is done."""
        heapq.heappop(self._ready[action.work])
        self.num_left -= 1
        self.live += (action.work is ActionKind.FORWARD) - (action.work is ActionKind.BACKWARD_WEIGHT)
        self.free_at = now + COSTS[action.work]
        self.events.append(Event(action, now, self.free_at))
        return self.free_at


class _Planner:
    """Lets the ranks of a zero-bubble V work through a batch in thought."""

    def __init__(self, placement: Placement, num_microbatches: int) -> None:
        self._placement, self._count = placement, num_microbatches
        self._workers = [_Worker(self._all_of(rank)) for rank in range(placement.num_ranks)]

    def run(self) -> Schedule:
        for microbatch in range(self._count):
            self._workers[self._placement.rank_of(0)].add(Action(ActionKind.FORWARD, 0, microbatch))
        ends: dict[int, list[Action]] = {}
        now = 0
        while any(worker.num_left for worker in self._workers):
            for action in ends.pop(now, ()):
                self._finish(action)
            for worker in self._workers:
                chosen = self._choice(worker) if worker.free_at <= now else None
                if chosen is not None:
                    ends.setdefault(worker.take(chosen, now), []).append(chosen)
            now = min(ends)
        return Schedule(self._placement, self._count, [worker.events for worker in self._workers])

    def _all_of(self, rank: int) -> list[Action]:
        """Return what a rank has to do, the preferred first: what is nearer to its end frees memory sooner."""
        return [
            Action(work, stage, microbatch)
            for stage in reversed(self._placement.stages_of(rank))
            for microbatch in range(self._count)
            for work in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
        ]

    def _finish(self, action: Action) -> None:
        """Let what has waited for an action alone be ready."""
        work, stage, microbatch = action.work, action.stage, action.microbatch
        is_last = stage == self._placement.num_stages - 1
        following: list[Action] = []
        if work is ActionKind.FORWARD:
            following.append(Action(ActionKind.BACKWARD_INPUT if is_last else work, stage + (not is_last), microbatch))
        elif work is ActionKind.BACKWARD_INPUT:
            # The forward there is long done: this microbatch has come back through the stages after it.
            following += [Action(work, stage - 1, microbatch)] if stage else []
            following += [Action(ActionKind.BACKWARD_WEIGHT, stage, microbatch)]
        for each in following:
            self._workers[self._placement.rank_of(each.stage)].add(each)

    def _choice(self, worker: _Worker) -> Action | None:
        """Return what a rank takes up."""
        chosen = worker.first(ActionKind.BACKWARD_INPUT)
        limit = 2 * self._placement.num_ranks
        if chosen is None and worker.live < limit:
            # The last room is for the way back: with only first halves in it, nothing could ever finish.
            chosen = worker.first(ActionKind.FORWARD)
            if chosen is not None and worker.live == limit - 1 and chosen.stage < self._placement.num_ranks:
                chosen = None
        return chosen or worker.first(ActionKind.BACKWARD_WEIGHT)
