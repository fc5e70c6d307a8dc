"""What has failed first, and the sentences that say so; pure decisions, without sockets or clocks.

When one rank fails, others soon fail of it, so the first failure is the one that is told: a rank raised, died or can't
be reached; ranks wait for one that has ended, or for each other; or a collective has come to its time limit. What is
known of a rank is the `Record` that it sends. Sentences about places are in the past tense: they fit one and several.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from booster_core.ranks import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ENDED = "ended normally"
_FRESH_BEATS = 3.0
_MISMATCH_SECONDS = 5.0
_MAX_NAMED = 10
_RULE = "Every rank must make the same calls in the same order"
_REMEDY = f"{_RULE}: not under `if rank == 0`, and with as many batches on each."
_EXIT = "The monitor can't see the code of a `sys.exit`: if there was one, that rank's output says why."


def beat_seconds(world_size: int) -> float:
    """Return how often a rank says where it is: rarely where there are many, as one rank hears all."""
    return min(max(1.0, world_size / 64), 10.0)


class Point(NamedTuple):
    """A call of Booster's, or a collective of a process group, that ranks make together.

    Args:
        place: Name of the call; of a collective, backend and name of the group.
        number: Which of the calls of that name, or of the group's collectives, it is.
        ranks: The ranks that make it; ``None`` for all.
        what: Of a collective its operation, as torch names it, and what else must be the same on all ranks.
    """

    place: str
    number: int
    ranks: tuple[int, ...] | None = None
    what: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.what:
            return f"`{self.place}` #{self.number}"
        operation, *tensors = self.what
        members = "all ranks" if self.ranks is None else name_ranks(self.ranks)
        return (
            f"`{operation}`{' of ' * bool(tensors)}{', '.join(tensors)}, number {self.number} of the group of {members}"
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """One rank's progress; see `booster_core.ranks.world.Progress`.

    Args:
        counts: The number of the last call of each name that has begun, and of the last collective of each group.
        last: The call that has begun or ended last.
        is_finished: Whether it has ended.
        waits: The outermost call that the rank is in, and the collectives in which it waits.
        seconds: For how long it has stood still there; 0 where it does not wait.
        overdue: The collective in which it has waited until the time limit, if it has.
        knows_groups: Whether groups without a count have had no collective on this rank.
        broken: The call that an exception has ended, which the script has caught, if any.
        error: That exception.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    last: Point | None = None
    is_finished: bool = True
    waits: Sequence[Point] = ()
    seconds: float = 0.0
    overdue: Point | None = None
    knows_groups: bool = False
    broken: Point | None = None
    error: str = ""

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Record:
        """Return the record whose ``vars`` a rank has sent."""
        single = ("last", "overdue", "broken")
        points = {name: None if message[name] is None else parse_point(message[name]) for name in single}
        return cls(**{**message, **points, "waits": [parse_point(each) for each in message["waits"]]})

    def has_come(self, point: Point) -> bool:
        """Return whether the rank has come to a call or a collective, or may have."""
        if any(own[:2] == point[:2] and own.what != point.what for own in self.waits):
            return False  # it has called another collective as the same one of the group
        is_unknown = bool(point.what) and not self.knows_groups
        return self.counts.get(point.place, point.number if is_unknown else 0) >= point.number

    def describe_place(self) -> str:
        """Say where the rank was."""
        if self.last is None:
            return "made no such call yet"
        return f"{'last finished' if self.is_finished else 'entered'} {self.last}"


def parse_point(value: Sequence[Any]) -> Point:
    """Return the point that a message names."""
    place, number, ranks, what = value
    return Point(place, number, None if ranks is None else tuple(ranks), tuple(what))


class FailureDetector:
    """The server's view of the run; times are seconds on any clock.

    Args:
        hosts: Host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._fresh_seconds = _FRESH_BEATS * beat_seconds(len(hosts))
        self._pids: dict[int, int] = {}
        self._alive: set[int] = set()
        self._records: dict[int, Record] = {}
        self._heard_at: dict[int, float] = {}
        self._gone: dict[int, str] = {}
        self._failed: int | None = None
        self.failure: str | None = None
        """What failed first."""

    def joined(self, rank: int, pid: int) -> None:
        """Take note of a rank that has connected."""
        self._pids[rank] = pid
        self._alive.add(rank)

    def speaks_without_server(self, rank: int) -> bool:
        """Return whether a rank is the lowest of its host besides rank 0, which holds the server."""
        return rank == next((r for r, host in enumerate(self._hosts) if r and host == self._hosts[rank]), None)

    def here(self, rank: int, record: Record, now: float) -> None:
        """Take note of where a rank is."""
        self._records[rank], self._heard_at[rank] = record, now

    def failed(self, rank: int, text: str) -> None:
        """Take note that a rank has raised."""
        self._fail(f"rank {rank} failed: {text}", rank)

    def ending(self, rank: int) -> None:
        """Take note that a rank makes no call any more."""
        self._gone[rank] = ENDED

    def left(self, rank: int, now: float, how: str | None) -> None:
        """Take note that a connection has ended: after a goodbye, or else ``how``."""
        self._alive.discard(rank)
        self._gone[rank] = ENDED if how is None else f"{how} (it {self._last_place(rank, now)})"
        if how is not None:
            self._fail(describe_death(rank, how), rank)

    def tick(self, now: float) -> None:
        """Look, about once a second, for ranks that wait for what never comes.

        Ranks make the same calls in the same order, and the same collectives of each group. So one that has ended
        without a call never comes to it; and of two that wait where the other has not come, neither ever does. Ranks
        that take no part in a call may make it more or less often.
        """
        waits = {
            rank: self._records[rank]
            for rank in sorted(self._records.keys() & self._alive - self._gone.keys())
            if self._records[rank].seconds and now - self._heard_at[rank] <= self._fresh_seconds
        }
        points: dict[Point, list[int]] = defaultdict(list)
        for rank, record in waits.items():
            for point in record.waits:
                points[point].append(rank)
        ended = next((text for point, ranks in points.items() if (text := self.ended(point, ranks))), None)
        if text := ended or self._find_broken(waits) or self._find_crossed(points, waits):
            self._fail(text)
        for record in waits.values():
            if record.overdue is not None:
                call = "".join(f"{point}, " for point in record.waits if not point.what)
                come = [rank for rank in self._members(record.overdue) if self._is_seen_at(record.overdue, rank)]
                text = self._describe_missing(record.overdue, come, now)
                self._fail(f"{call}{record.overdue}, has come to its time limit: {text}")

    def _is_seen_at(self, point: Point, rank: int) -> bool:
        """Return whether a rank waits in a collective, or has been through it, as those that send nothing back may."""
        record = self._record(rank)
        return point in record.waits or (point.place in record.counts and record.has_come(point))

    def missing(self, point: Point, now: float) -> str:
        """Say which ranks have not come to a call."""
        come = [rank for rank in self._members(point) if self._record(rank).has_come(point)]
        return self._describe_missing(point, come, now)

    def ended(self, point: Point, waiting: Sequence[int]) -> str | None:
        """Say which ranks have ended without coming to a call in which others wait, if any."""
        ended = [rank for rank, how in sorted(self._gone.items()) if how == ENDED and rank in self._members(point)]
        ended = [rank for rank in ended if not self._record(rank).has_come(point)]
        if not ended:
            return None
        return (
            f"{name_ranks(ended)} ended normally while {name_ranks(waiting)} {_verb(waiting, 'wait')} in {point}, "
            f"which {'it' if len(ended) == 1 else 'they'} never called. {_REMEDY} {_EXIT}"
        )

    def news(self, now: float) -> dict[int, dict[str, Any]]:
        """Return what to tell each rank of the failure; on each host the lowest rank that goes on says it."""
        failed, size = self._failed, len(self._hosts)
        who = "" if failed is None else f" Rank {failed} was process {self._pids[failed]} on {self._hosts[failed]}."
        places = _describe_places({rank: self._place(rank, now) for rank in range(size)})
        text = f"Booster: {self.failure}\nBooster: all {size} ranks end.{who} Last calls: {places}.\n"
        lowest: dict[str, int] = {}
        for rank in sorted(self._alive - self._gone.keys() - {failed}):
            lowest.setdefault(self._hosts[rank], rank)
        return {rank: {"text": text, "reports_for_host": rank in lowest.values()} for rank in sorted(self._alive)}

    def _find_broken(self, waits: Mapping[int, Record]) -> str | None:
        """Say which rank has left a call by an exception alone: others came to it, and wait there or in a later one."""
        for rank in sorted(self._alive):
            left = self._record(rank).broken
            waiting = [] if left is None else [each for each in waits if self._waits_after(left, each, rank)]
            if waiting:
                return (
                    f"rank {rank} left {left} by an exception that its script caught, and {name_ranks(waiting)} "
                    f"{_verb(waiting, 'wait')} in {waits[waiting[0]].waits[0]}: {self._record(rank).error}\n"
                    "Booster: Let an exception end the run, or catch one that every rank raises."
                )
        return None

    def _waits_after(self, left: Point, other: int, rank: int) -> bool:
        """Return whether another rank, which came to the call that ``rank`` left, has waited for that for a while."""
        record = self._record(other)
        is_patient = record.seconds >= _MISMATCH_SECONDS and record.broken is None
        is_part = is_patient and other in self._members(left) and record.has_come(left)
        return is_part and any(rank in self._members(point) for point in record.waits)

    def _find_crossed(self, points: Mapping[Point, list[int]], waits: Mapping[int, Record]) -> str | None:
        """Say which ranks have waited for a while where another has not come that waits where they have not."""
        patient = {rank: record for rank, record in waits.items() if record.seconds >= _MISMATCH_SECONDS}
        for point, ranks in points.items():
            here = [rank for rank in ranks if rank in patient]
            others = (patient.get(rank) for rank in self._members(point)) if here else ()
            elsewhere = {there for other in others if other and not other.has_come(point) for there in other.waits}
            for there in elsewhere:
                if any(rank in self._members(there) and not patient[rank].has_come(there) for rank in here):
                    # Ranks that came to one of these points later, or were busy until now, are named with it too.
                    at = [([r for r in self._alive if each in self._record(r).waits], each) for each in (point, there)]
                    places = [f"{name_ranks(ranks)} {_verb(ranks, 'wait')} in {each}" for ranks, each in sorted(at)]
                    return f"the ranks wait for each other in different calls: {', and '.join(places)}. {_REMEDY}"
        return None

    def _members(self, point: Point) -> Sequence[int]:
        return range(len(self._hosts)) if point.ranks is None else point.ranks

    def _fail(self, text: str, rank: int | None = None) -> None:
        if self.failure is None:
            self.failure, self._failed = text, rank

    def _record(self, rank: int) -> Record:
        return self._records.get(rank, _NOTHING)

    def _describe_missing(self, point: Point, come: Iterable[int], now: float) -> str:
        places = {rank: self._place(rank, now) for rank in sorted({*self._members(point)}.difference(come))}
        if not places:
            return (
                "every rank has reached it, so ranks call different collectives in it, or one is too slow. Raise "
                "`timeout_seconds` in the launch if it may take that long."
            )
        if len(places) == 1:
            return f"{name_ranks([*places])} has not reached it; it {next(iter(places.values()))}. {_RULE}."
        return f"{name_ranks([*places])} have not reached it; {_describe_places(places)}. {_RULE}."

    def _place(self, rank: int, now: float) -> str:
        """Say where a rank was."""
        if rank in self._gone:
            return self._gone[rank]
        if rank not in self._pids:
            return "had not connected"
        if now - self._heard_at.get(rank, now) > self._fresh_seconds:
            return f"gave no sign of life (it {self._last_place(rank, now)})"
        return self._record(rank).describe_place()

    def _last_place(self, rank: int, now: float) -> str:
        age = f", {now - self._heard_at[rank]:.1f} s before" if rank in self._heard_at else ""
        return f"{self._record(rank).describe_place()} when last heard of{age}"


_NOTHING = Record()


def _describe_places(places: Mapping[int, str]) -> str:
    """Return where each rank was, ranks at the same place together."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, place in sorted(places.items()):
        ranks[place].append(rank)
    groups = [f"{name_ranks(group)} {place}" for place, group in ranks.items()]
    more = [f"{len(groups) - _MAX_NAMED} other places"] if len(groups) > _MAX_NAMED else []
    return "; ".join(groups[:_MAX_NAMED] + more)


def describe_death(rank: int, how: str) -> str:
    """Say that a rank was lost that said nothing itself."""
    if how != "died":
        return f"rank {rank} {how}: its machine or the network is down."
    return (
        f"rank {rank} died without a traceback: killed by a signal, by the system because memory ran out, by a library "
        "that aborted (exit status -6: in a collective, gloo does so where ranks' tensors differ in size or dtype), or "
        "ended by its own code (`os._exit`)."
    )


def _verb(subjects: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(subjects) == 1 else verb
