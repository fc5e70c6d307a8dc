"""A schedule is a list of actions for each rank; it is made and checked without ranks.

A model is cut into *stages*. A rank holds one or several of them, its *chunks*; a *microbatch* passes through all
stages forward and back. A schedule decides in which order each rank does what it has to do. It is found by letting the
ranks work through one batch in thought, each taking up, whenever it is free, what its schedule prefers among what is
ready. So the lists fit together by construction: nobody waits for something that comes later.

References: GPipe (Huang et al. 2019, arXiv:1811.06965); 1F1B (Narayanan et al. 2019, "PipeDream", and 2021,
arXiv:2104.04473, for the interleaved form); the zero-bubble V (Qi et al. 2024, arXiv:2405.15362).
"""

from __future__ import annotations

import enum
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
    """Which stages lie on which rank.

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
    start: float
    stop: float


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one batch, in which order.

    Args:
        placement: Which stages lie where.
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
    def duration(self) -> float:
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
    plans = [_Planner(style, placement, num_microbatches, is_strict=False).run()]
    if style == "interleaved":
        plans.append(_Planner(style, placement, num_microbatches, is_strict=True).run())
    return min(plans, key=lambda plan: plan.duration)


class _Planner:
    """Lets the ranks work through a batch in thought.

    ``is_strict`` keeps forward and backward in turns, which the interleaved schedule needs to be as short as it can be.
    """

    def __init__(self, style: str, placement: Placement, num_microbatches: int, *, is_strict: bool) -> None:
        self._style, self._placement, self._count = style, placement, num_microbatches
        self._done: dict[Action, float] = {}
        self._events: list[list[Event]] = [[] for _ in range(placement.num_ranks)]
        self._free = [0.0] * placement.num_ranks
        self._live = [0] * placement.num_ranks
        self._left = [self._all_of(rank) for rank in range(placement.num_ranks)]
        self._is_strict = is_strict

    def run(self) -> Schedule:
        now = 0.0
        while any(self._left):
            if all(free <= now for free in self._free) and not any(
                next(self._choices(rank, now), None) for rank in range(self._placement.num_ranks)
            ):
                # The strict order of the interleaved schedule can't be kept where the last group of microbatches is
                # too small to fill the pipeline: from here on whatever is ready is done.
                self._is_strict = False
            for rank in range(self._placement.num_ranks):
                if self._free[rank] <= now:
                    action = next(self._choices(rank, now), None)
                    if action is not None:
                        self._take(rank, action, now)
            now += 1.0
        return Schedule(self._placement, self._count, self._events)

    def _all_of(self, rank: int) -> dict[Action, None]:
        """Return what a rank has to do, the preferred first within each kind of work."""
        backward = (Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT) if self._style == "zbv" else (Work.BACKWARD,)
        ranks = self._placement.num_ranks
        actions = [
            Action(work, stage, microbatch)
            for work in (Work.FORWARD, *backward)
            for stage in self._placement.stages_of(rank)
            for microbatch in range(self._count)
        ]

        def order(action: Action) -> tuple[int, int, int]:
            # As many microbatches as there are ranks pass through a chunk before the next chunk's turn.
            chunk = action.stage // ranks
            if self._style == "zbv":
                return (0, -chunk, action.microbatch)  # what is nearer to its end frees memory sooner
            toward = chunk if action.work is Work.FORWARD else -chunk
            return (action.microbatch // ranks, toward, action.microbatch)

        return dict.fromkeys(sorted(actions, key=order))

    def _choices(self, rank: int, now: float) -> Iterator[Action]:
        """Yield what a rank may take up, in the order of its preference."""
        if self._is_strict:
            due = self._due(rank)
            if due is not None and self._is_ready(due, now):
                yield due
            return
        ready = [action for action in self._left[rank] if self._is_ready(action, now)]
        forwards = [action for action in ready if action.work is Work.FORWARD]
        if self._style == "gpipe":
            yield from forwards
            if any(action.work is Work.FORWARD for action in self._left[rank]):
                return
        yield from (action for action in ready if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT))
        if self._live[rank] < self._limit(rank):
            yield from self._in_order(rank, forwards)
        yield from (action for action in ready if action.work is Work.BACKWARD_WEIGHT)

    def _due(self, rank: int) -> Action | None:
        """Return what is next in turn: some forwards to warm up, then forward and backward by turns."""
        forward = next((action for action in self._left[rank] if action.work is Work.FORWARD), None)
        backward = next((action for action in self._left[rank] if action.work is not Work.FORWARD), None)
        if forward is None or (self._live[rank] >= self._limit(rank) and backward is not None):
            return backward
        return forward

    def _in_order(self, rank: int, forwards: Sequence[Action]) -> Sequence[Action]:
        """Return the forwards that may be taken up now: out of order only where activations can't run out of room."""
        if self._style == "zbv":
            # The last room is for the way back: with only first halves in it, nothing could ever finish.
            has_room = self._live[rank] < self._limit(rank) - 1
            return [action for action in forwards if has_room or action.stage >= self._placement.num_ranks]
        first = next(action for action in self._left[rank] if action.work is Work.FORWARD) if forwards else None
        return [action for action in forwards if action == first]

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

    def _is_ready(self, action: Action, now: float) -> bool:
        work, stage, microbatch = action.work, action.stage, action.microbatch
        if work is Work.FORWARD:
            needed = [Action(Work.FORWARD, stage - 1, microbatch)] if stage else []
        elif work is Work.BACKWARD_WEIGHT:
            needed = [Action(Work.BACKWARD_INPUT, stage, microbatch)]
        else:
            needed = [Action(Work.FORWARD, stage, microbatch)]
            if stage < self._placement.num_stages - 1:
                needed.append(Action(work, stage + 1, microbatch))
        return all(self._done.get(each, now + 1) <= now for each in needed)

    def _take(self, rank: int, action: Action, now: float) -> None:
        stop = now + COSTS[action.work]
        self._events[rank].append(Event(action, now, stop))
        self._done[action] = stop
        self._free[rank] = stop
        del self._left[rank][action]
        if action.work is Work.FORWARD:
            self._live[rank] += 1
        elif action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
            self._live[rank] -= 1
