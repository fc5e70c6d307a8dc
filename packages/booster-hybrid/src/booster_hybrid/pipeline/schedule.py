"""A schedule is a list of actions for each rank; it is made and checked without ranks.

A model is cut into *stages*. A rank holds one or several of them, its *chunks*; a *microbatch* passes through all
stages forward and back. A schedule decides in which order each rank does what it has to do. It is found by letting the
ranks work through one batch in thought, each taking up, whenever it is free, what its schedule prefers among what is
ready. So the lists fit together by construction: nobody waits for something that comes later.

References: GPipe (Huang et al. 2019, arXiv:1811.06965); 1F1B (Narayanan et al. 2019, "PipeDream", and 2021,
arXiv:2104.04473, for the interleaved form); the zero-bubble V (Qi et al. 2024, arXiv:2405.15362).
"""

from __future__ import annotations

import bisect
import enum
import functools
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

STYLES = ("gpipe", "1f1b", "interleaved", "zbv")


class Work(enum.Enum):
    """What a rank does with one microbatch in one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs and weights, at once."""
    BACKWARD_INPUT = "backward_input"
    """Gradients of the stage's inputs, which the stage before waits for."""
    BACKWARD_WEIGHT = "backward_weight"
    """Gradients of the stage's weights, which nobody waits for."""


COSTS: Mapping[Work, int] = {
    Work.FORWARD: 1,
    Work.BACKWARD: 2,
    Work.BACKWARD_INPUT: 1,
    Work.BACKWARD_WEIGHT: 1,
}
"""How long each takes, for one stage, in the time of a forward: gradients cost two products for each of forward's."""


_BACKWARDS = (Work.BACKWARD, Work.BACKWARD_INPUT)


@dataclass(frozen=True)
class Action:
    """One piece of work.

    Args:
        work: What to do.
        stage: In which stage of the whole model.
        microbatch: With which part of the batch.
    """

    work: Work
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


@dataclass(frozen=True)
class Event:
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
        return [event.action for event in self.events[rank]]

    @property
    def is_split(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return any(event.action.work is Work.BACKWARD_WEIGHT for event in self.events[0])

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
            if event.action.work is Work.FORWARD:
                live += 1
                peak = max(peak, live)
            elif event.action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
                live -= 1
        return peak


@functools.lru_cache(maxsize=16)
def make_schedule(style: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule of a style.

    Args:
        style: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` or ``"zbv"``.
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
    wanted = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved": (2, None), "zbv": (2, 2)}[style]
    low, high = wanted
    if num_chunks < low or (high is not None and num_chunks > high):
        many = f"{low}" if high == low else f"at least {low}"
        msg = f"`pp_style={style!r}` puts {many} stage(s) on each rank, but `num_model_chunks={num_chunks}`."
        raise ConfigError(msg)
    placement = Placement(num_ranks, num_chunks, is_v=style == "zbv")
    if style != "interleaved":
        return _Planner(style, placement, num_microbatches).run()
    # A last group of fewer microbatches than ranks can't take turns all the way, so a full one is planned, and cut.
    full = -(-num_microbatches // num_ranks) * num_ranks
    return _without_surplus(_Planner(style, placement, full).run(), num_microbatches)


def _without_surplus(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return a schedule with fewer microbatches, its actions in the same order and as early as that lets them be."""
    placement = schedule.placement
    left = [
        deque(action for action in schedule.actions(rank) if action.microbatch < num_microbatches)
        for rank in range(placement.num_ranks)
    ]
    events: list[list[Event]] = [[] for _ in left]
    stops: dict[Action, int] = {}
    while any(left):
        for mine, done in zip(left, events, strict=True):
            while mine and all(need in stops for need in _needed(mine[0], placement)):
                action = mine.popleft()
                free = [done[-1].stop] if done else [0]
                start = max(free + [stops[need] for need in _needed(action, placement)])
                done.append(Event(action, start, start + COSTS[action.work]))
                stops[action] = done[-1].stop
    return Schedule(placement, num_microbatches, events)


def _needed(action: Action, placement: Placement) -> list[Action]:
    """Return what has to be done right before an action of a schedule whose backward is not split."""
    work, stage, microbatch = action.work, action.stage, action.microbatch
    if work is Work.FORWARD:
        return [Action(work, stage - 1, microbatch)] if stage else []
    is_last = stage == placement.num_stages - 1
    return [Action(Work.FORWARD, stage, microbatch) if is_last else Action(work, stage + 1, microbatch)]


class _Worker:
    """What a rank has still to do, and what of it is ready.

    Args:
        actions: All that it has to do, the preferred first.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._place = {action: place for place, action in enumerate(actions)}
        self.forwards = deque(action for action in actions if action.work is Work.FORWARD)
        self.backwards = deque(action for action in actions if action.work in _BACKWARDS)
        self._ready: dict[Work, list[tuple[int, Action]]] = {work: [] for work in Work}
        self._is_ready: set[Action] = set()
        self.num_left = len(actions)
        self.free_at = 0
        self.live = 0
        self.events: list[Event] = []

    def add(self, action: Action) -> None:
        """Tell that nothing is missing for an action any more."""
        bisect.insort(self._ready[action.work], (self._place[action], action), key=_first)
        self._is_ready.add(action)

    def is_ready(self, action: Action | None) -> bool:
        return action in self._is_ready

    def ready(self, *works: Work) -> Iterator[Action]:
        """Yield the actions of some kinds that are ready, in the order of preference."""
        for _, action in heapq.merge(*(self._ready[work] for work in works), key=_first):
            yield action

    def take(self, action: Action, now: int) -> int:
        """Do something; return when it is done."""
        entries = self._ready[action.work]
        del entries[bisect.bisect_left(entries, self._place[action], key=_first)]
        if action.work is not Work.BACKWARD_WEIGHT:
            (self.forwards if action.work is Work.FORWARD else self.backwards).remove(action)
        self.num_left -= 1
        self.live += (action.work is Work.FORWARD) - (action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT))
        self.free_at = now + COSTS[action.work]
        self.events.append(Event(action, now, self.free_at))
        return self.free_at


def _first(entry: tuple[int, Action]) -> int:
    return entry[0]


class _Planner:
    """Lets the ranks work through a batch in thought."""

    def __init__(self, style: str, placement: Placement, num_microbatches: int) -> None:
        self._style, self._placement, self._count = style, placement, num_microbatches
        self._workers = [_Worker(self._all_of(rank)) for rank in range(placement.num_ranks)]

    def run(self) -> Schedule:
        for microbatch in range(self._count):
            self._workers[self._placement.rank_of(0)].add(Action(Work.FORWARD, 0, microbatch))
        ends: dict[int, list[Action]] = {}
        now = 0
        while any(worker.num_left for worker in self._workers):
            for action in ends.pop(now, ()):
                self._finish(action)
            for rank, worker in enumerate(self._workers):
                chosen = self._choice(rank, worker) if worker.free_at <= now else None
                if chosen is not None:
                    ends.setdefault(worker.take(chosen, now), []).append(chosen)
            now = min(ends)
        return Schedule(self._placement, self._count, [worker.events for worker in self._workers])

    def _all_of(self, rank: int) -> list[Action]:
        """Return what a rank has to do, the preferred first within each kind of work."""
        backward = (Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT) if self._style == "zbv" else (Work.BACKWARD,)
        ranks = self._placement.num_ranks
        actions = [
            Action(work, stage, microbatch)
            for work in (Work.FORWARD, *backward)
            for stage in self._placement.stages_of(rank)
            for microbatch in range(self._count)
        ]

        def order(action: Action) -> tuple[int, ...]:
            # As many microbatches as there are ranks pass through a chunk before the next chunk's turn.
            if self._style == "zbv":
                return (-action.stage, action.microbatch)  # what is nearer to its end frees memory sooner
            toward = action.stage if action.work is Work.FORWARD else -action.stage
            return (action.microbatch // ranks, toward, action.microbatch)

        return sorted(actions, key=order)

    def _finish(self, action: Action) -> None:
        """Let what has waited for an action alone be ready."""
        work, stage, microbatch = action.work, action.stage, action.microbatch
        is_last = stage == self._placement.num_stages - 1
        following: list[Action] = []
        if work is Work.FORWARD:
            backward = Work.BACKWARD_INPUT if self._style == "zbv" else Work.BACKWARD
            following.append(Action(backward if is_last else work, stage if is_last else stage + 1, microbatch))
        elif work in _BACKWARDS:
            # The forward there is long done: this microbatch has come back through the stages after it.
            following += [Action(work, stage - 1, microbatch)] if stage else []
            following += [Action(Work.BACKWARD_WEIGHT, stage, microbatch)] if work is Work.BACKWARD_INPUT else []
        for each in following:
            self._workers[self._placement.rank_of(each.stage)].add(each)

    def _choice(self, rank: int, worker: _Worker) -> Action | None:
        """Return what a rank takes up."""
        if self._style == "interleaved":
            due = self._due(rank, worker)
            return due if worker.is_ready(due) else None
        forwards_first = self._style == "gpipe" and worker.forwards
        chosen = None if forwards_first else next(worker.ready(*_BACKWARDS), None)
        if chosen is None and worker.live < self._limit(rank):
            chosen = self._forward(rank, worker)
        return chosen or next(worker.ready(Work.BACKWARD_WEIGHT), None)

    def _due(self, rank: int, worker: _Worker) -> Action | None:
        """Return the next action in turn, without which this schedule is longer: forwards to warm up, then by turns."""
        if worker.forwards and worker.live < self._limit(rank):
            return worker.forwards[0]
        return worker.backwards[0] if worker.backwards else None

    def _forward(self, rank: int, worker: _Worker) -> Action | None:
        """Return the forward to take up."""
        ready = worker.ready(Work.FORWARD)
        if self._style == "zbv" and worker.live == self._limit(rank) - 1:
            # The last room is for the way back: with only first halves in it, nothing could ever finish.
            ready = (action for action in ready if action.stage >= self._placement.num_ranks)
        return next(ready, None)

    def _limit(self, rank: int) -> int:
        """Return how many forwards a rank may keep activations of."""
        ranks, chunks = self._placement.num_ranks, self._placement.num_chunks
        if self._style == "gpipe":
            return self._count
        if self._style == "1f1b":
            return ranks - rank
        if self._style == "interleaved":
            return 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
        return 2 * ranks
