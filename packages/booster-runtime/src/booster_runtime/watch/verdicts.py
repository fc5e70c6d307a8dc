"""Which failure came first, who is missing, and the sentences that say so; pure decisions, without sockets or clocks.

When one rank fails, others soon fail of it, so the first failure is the one that is told. It is one of these: a rank
raised, a connection closed without a goodbye, a rank can't be reached, ranks wait for each other in different calls or
collectives, or have told of different ones, they wait for one that has ended, or a collective is about to end its
process. On each host the lowest rank that goes on says it. Sentences about places are in the past tense, so that they
fit one rank and several.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from booster_core.ranks import name_ranks
from booster_runtime.watch.noted_calls import NotedCalls

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from booster_runtime.collectives.call_sites import NotedCall

ENDED = "ended normally"
_RANKS_PER_SECOND = 256
_FRESH_BEATS = 3.0
_MISMATCH_SECONDS = 5.0
_AHEAD_SECONDS = 5.0
"""How long before a collective ends its process it is judged, besides the time in which ranks say that they wait."""
_MAX_ASKED = 16
_MAX_NAMED = 10
_OF_EQUAL_SIZES = ("all_reduce", "reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base")
"""Collectives whose tensors have the same number of elements on every rank; torch's names of them."""
_RULE = "Every rank must make the same calls in the same order"
_REMEDY = f"{_RULE}: not under `if rank == 0`, and with as many batches on each."
_EXIT = "The monitor can't see the code of a `sys.exit`: if there was one, that rank's output says why."


def beat_seconds(world_size: int) -> float:
    """Return how often a waiting rank says that it still waits: rarely where there are many, as one rank hears all."""
    return max(1.0, world_size / _RANKS_PER_SECOND)


class Call(NamedTuple):
    """A call of Booster's that ranks make together.

    Args:
        name: Its name.
        number: Which of the calls of that name it is.
        ranks: The ranks that make it; ``None`` for all.
    """

    name: str
    number: int
    ranks: frozenset[int] | None = None

    def __str__(self) -> str:
        return f"`{self.name}` #{self.number}"


class Collective(NamedTuple):
    """A collective of a process group.

    Args:
        group: Backend and name of the group.
        number: Which of its collectives it is.
        ranks: The ranks of the group.
        operation: What the rank calls, as torch names it.
    """

    group: str
    number: int
    ranks: frozenset[int] | None
    operation: str

    def __str__(self) -> str:
        members = "all ranks" if self.ranks is None else name_ranks(sorted(self.ranks))
        return f"`{self.operation}`, number {self.number} of the group of {members}"


@dataclass(frozen=True, kw_only=True)
class Told:
    """A collective as a rank has told of it.

    Args:
        collective: The collective.
        tensors: Number of elements and dtype of its tensors.
        is_waiting: Whether the rank waits in it.
        left_seconds: After which time it ends its process, where it does.
    """

    collective: Collective
    tensors: tuple[str, ...] = ()
    is_waiting: bool = True
    left_seconds: float | None = None

    @property
    def kind(self) -> tuple[str, ...]:
        """What must be the same on every rank."""
        operation = self.collective.operation
        return (operation, *self.tensors) if operation in _OF_EQUAL_SIZES else (operation,)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One rank's progress when it was last heard of; see `booster_core.ranks.world.Progress`.

    Args:
        counts: How often each call has begun.
        last: The call that has begun or ended last.
        is_finished: Whether it has ended.
        call: The outermost call that the rank is in.
        collectives: Those in which the rank waits, and those that it was asked for.
        begun: The number of the last collective of each group.
        knows_groups: Whether groups that ``begun`` does not have had no collective on this rank.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    last: Call | None = None
    is_finished: bool = True
    call: Call | None = None
    collectives: tuple[Told, ...] = ()
    begun: Mapping[str, int] = field(default_factory=dict)
    knows_groups: bool = False

    @classmethod
    def parse(cls, message: Mapping[str, Any], world_size: int) -> Record:
        """Return the record that a rank has sent.

        Raises:
            Exception: If it is none, of whichever kind.
        """
        last, call = message.get("last"), message.get("call")
        return cls(
            counts={str(name): int(count) for name, count in (message.get("counts") or {}).items()},
            last=None if last is None else parse_call(last, None, world_size),
            is_finished=bool(message.get("finished", True)),
            call=None if call is None else parse_call(call, message.get("ranks"), world_size),
            collectives=tuple(_parse_told(each, world_size) for each in message.get("collectives") or ()),
            begun={str(group): int(number) for group, number in (message.get("begun") or {}).items()},
            knows_groups=bool(message.get("knows_groups", False)),
        )

    def has_come(self, point: Call | Collective) -> bool:
        """Return whether the rank has come to a call or a collective, or may have."""
        if isinstance(point, Call):
            return self.counts.get(point.name, 0) >= point.number
        return self.begun.get(point.group, 0 if self.knows_groups else point.number) >= point.number

    def waits_in(self) -> list[Call | Collective]:
        """Return where a rank waits that does wait."""
        own: list[Call | Collective] = [] if self.call is None else [self.call]
        return own + [told.collective for told in self.collectives if told.is_waiting]

    def place(self) -> str:
        """Say where the rank was."""
        if self.last is None:
            return "made no such call yet"
        return f"{'last finished' if self.is_finished else 'entered'} {self.last}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why all ranks end.

    Args:
        rank: The rank that failed; ``None`` where it is no single one.
        text: What happened.
        overdue: The collective that nearly ends its process, whose missing ranks are yet to be named.
    """

    rank: int | None
    text: str
    overdue: Collective | None = None


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """A rank that has stood still in a call for some seconds, as it said at a time."""

    rank: int
    record: Record
    seconds: float
    at: float


class Verdicts:
    """The server's view of the run; times are seconds on any clock.

    Args:
        hosts: Host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._pids: dict[int, int] = {}
        self._alive: set[int] = set()
        self._records: dict[int, Record] = {}
        self._heard_at: dict[int, float] = {}
        self._waits: dict[int, _Wait] = {}
        self._asked: set[tuple[str, int]] = set()
        self._noted = NotedCalls()
        self.gone: dict[int, str] = {}
        """How each rank went that makes no call any more."""
        self.failure: Failure | None = None
        """What failed first."""

    @property
    def present(self) -> set[int]:
        """The ranks that are connected and do not end."""
        return self._alive - self.gone.keys()

    def joined(self, rank: int, pid: int) -> None:
        """Take note of a rank that has connected."""
        self._pids[rank] = pid
        self._alive.add(rank)

    def speaks_without_server(self, rank: int) -> bool:
        """Return whether a rank is the lowest of its host besides rank 0, which holds the server."""
        return rank == next((r for r, host in enumerate(self._hosts) if r and host == self._hosts[rank]), None)

    def failed(self, rank: int, text: str, record: Record) -> None:
        """Take note that a rank has raised."""
        self._records[rank] = record
        self._fail(rank, f"Booster: rank {rank} failed: {text}")

    def lost(self, rank: int, now: float, how: str = "died") -> None:
        """Take note that a connection has ended without a goodbye."""
        if rank not in self._alive:
            return
        self._alive.discard(rank)
        age = f", {now - self._heard_at[rank]:.1f} s before" if rank in self._heard_at else ""
        self.gone[rank] = f"{how} (it {self._record(rank).place()} when last heard of{age})"
        self._fail(rank, describe_death(rank, how))

    def called(self, rank: int, call: NotedCall) -> None:
        """Take note of a rank's call of a collective, which it may wait in or not."""
        text = self._noted.add(rank, call)
        if text is not None:
            self._fail(None, f"Booster: {text}")

    def ending(self, rank: int, record: Record) -> None:
        """Take note that a rank makes no call any more."""
        self._records[rank] = record
        self.gone[rank] = ENDED

    def left(self, rank: int) -> None:
        """Take note of a rank's goodbye."""
        self._alive.discard(rank)
        self.gone[rank] = ENDED

    def here(self, rank: int, record: Record, waited_seconds: float, now: float) -> None:
        """Take note of where a rank is, and for how long it has waited there."""
        self._records[rank] = record
        self._heard_at[rank] = now
        self._waits.pop(rank, None)
        if waited_seconds and rank not in self.gone:
            self._waits[rank] = _Wait(rank=rank, record=record, seconds=waited_seconds, at=now)

    def tick(self, now: float) -> None:
        """Look, about once a second, for ranks that wait for what never comes.

        Ranks make the same calls in the same order, and the same collectives of each group. So one that has ended
        without a call never comes to it; and of two that wait where the other has not come, neither ever does. Ranks
        that take no part in a call may make it more or less often.
        """
        if not self._waits or self.failure is not None:
            return
        self._waits = {wait.rank: wait for wait in self._fresh_waits(now)}
        points: dict[Call | Collective, list[_Wait]] = defaultdict(list)
        for wait in self._waits.values():
            for point in wait.record.waits_in():
                points[point].append(wait)
        text = self._find_ended(points) or self._find_differing(points) or self._find_crossed(points)
        if text is not None:
            self._fail(None, f"Booster: {text}")
        else:
            self._judge_overdue(now)

    def places_to_ask(self) -> list[tuple[str, int]]:
        """Return groups and numbers of collectives in which ranks wait, to ask all what they called there; each once.

        The record of a rank that went through one with other tensors, without an error, tells of it only if asked.
        """
        waited = {
            (told.collective.group, told.collective.number)
            for wait in self._waits.values()
            if wait.seconds >= _MISMATCH_SECONDS
            for told in wait.record.collectives
        }
        self._asked &= waited
        places = sorted(waited - self._asked)[:_MAX_ASKED]
        self._asked.update(places)
        return places

    def missing(self, call: Call, silent: Collection[int]) -> str:
        """Say which ranks have not come to a call; ``silent`` ones have not answered."""
        asked = range(len(self._hosts)) if call.ranks is None else call.ranks
        missing = [rank for rank in asked if not self._record(rank).has_come(call)]
        return describe_missing({rank: self._place(rank, silent) for rank in missing})

    def ended(self, askers: Sequence[int], call: Call) -> str | None:
        """Say which ranks have ended without coming to a call in which ``askers`` wait, if any."""
        never = [rank for rank in self._ended_ranks(call) if not self._record(rank).has_come(call)]
        return describe_ended(never, askers, call) if never else None

    def places(self, silent: Collection[int]) -> str:
        """Say where each rank was when last heard of."""
        return describe_places({rank: self._place(rank, silent) for rank in range(len(self._hosts))})

    def news(self, silent: Collection[int]) -> dict[int, dict[str, Any]]:
        """Return what to tell each rank of the failure."""
        assert self.failure is not None
        failed, what = self.failure.rank, self.failure.text
        if self.failure.overdue is not None:
            what += self._describe_overdue(self.failure.overdue, silent)
        who = "" if failed is None else f" Rank {failed} was process {self._pids[failed]} on {self._hosts[failed]}."
        text = f"{what}\nBooster: all {len(self._hosts)} ranks end.{who} Last calls: {self.places(silent)}.\n"
        told = {"type": "failure", "rank": failed, "text": text}
        lowest: dict[str, int] = {}
        for rank in sorted(self.present - {failed}):
            lowest.setdefault(self._hosts[rank], rank)
        speakers = set(lowest.values())
        return {rank: {**told, "speaks": rank in speakers} for rank in sorted(self._alive)}

    def _fresh_waits(self, now: float) -> list[_Wait]:
        fresh_seconds = _FRESH_BEATS * beat_seconds(len(self._hosts))
        present = self.present
        return [w for rank, w in sorted(self._waits.items()) if rank in present and now - w.at <= fresh_seconds]

    def _find_ended(self, points: Mapping[Call | Collective, list[_Wait]]) -> str | None:
        """Say which ranks have ended without coming to where others wait."""
        for point, waits in points.items():
            never = [rank for rank in self._ended_ranks(point) if not self._record(rank).has_come(point)]
            if never:
                return describe_ended(never, [wait.rank for wait in waits], point)
        return None

    def _find_differing(self, points: Mapping[Call | Collective, list[_Wait]]) -> str | None:
        """Say which ranks have called different collectives as the same one of a group."""
        waited = {(point.group, point.number) for point in points if isinstance(point, Collective)}
        if not waited:
            return None
        found: dict[tuple[str, int], dict[tuple[str, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank in sorted(self.present):
            for told in self._record(rank).collectives:
                place = told.collective.group, told.collective.number
                if place in waited:
                    found[place][told.kind].append(rank)
        for (_, number), kinds in found.items():
            if len(kinds) > 1:
                return describe_differing(number, kinds)
        return None

    def _find_crossed(self, points: Mapping[Call | Collective, list[_Wait]]) -> str | None:
        """Say which ranks have waited for a while where another has not come that waits where they have not."""
        for point, waits in points.items():
            patient = [wait for wait in waits if wait.seconds >= _MISMATCH_SECONDS]
            elsewhere: set[Call | Collective] = set()
            for other in (self._waits.get(rank) for rank in self._members(point)) if patient else ():
                if other is not None and other.seconds >= _MISMATCH_SECONDS and not other.record.has_come(point):
                    elsewhere.update(other.record.waits_in())
            for there in elsewhere:
                if any(_includes(there, wait.rank) and not wait.record.has_come(there) for wait in patient):
                    # Ranks that came to one of these points later, or were busy until now, are named with it too.
                    ranks = {each: self._ranks_at(each) for each in (point, there)}
                    return describe_mismatch(ranks)
        return None

    def _judge_overdue(self, now: float) -> None:
        """Fail where a collective is about to end its process: the ranks that it lacks are asked where they are."""
        ahead = _AHEAD_SECONDS + 2 * beat_seconds(len(self._hosts))
        for wait in self._waits.values():
            for told in wait.record.collectives:
                left = told.left_seconds
                if told.is_waiting and left is not None and left - (now - wait.at) <= ahead and self.failure is None:
                    where = "" if wait.record.call is None else f"{wait.record.call}, "
                    text = f"Booster: {where}{told.collective}, is about to be ended at its time limit: "
                    self.failure = Failure(rank=None, text=text, overdue=told.collective)

    def _describe_overdue(self, collective: Collective, silent: Collection[int]) -> str:
        missing = [
            rank
            for rank in self._members(collective)
            if rank in self.gone or rank in silent or not self._record(rank).has_come(collective)
        ]
        return describe_missing({rank: self._place(rank, silent) for rank in missing})

    def _ended_ranks(self, point: Call | Collective) -> list[int]:
        return [rank for rank, how in sorted(self.gone.items()) if how == ENDED and _includes(point, rank)]

    def _ranks_at(self, point: Call | Collective) -> list[int]:
        return [rank for rank in sorted(self.present) if point in self._record(rank).waits_in()]

    def _members(self, point: Call | Collective) -> Iterable[int]:
        return range(len(self._hosts)) if point.ranks is None else sorted(point.ranks)

    def _fail(self, rank: int | None, text: str) -> None:
        if self.failure is None:
            self.failure = Failure(rank=rank, text=text)

    def _record(self, rank: int) -> Record:
        return self._records.get(rank, _NOTHING)

    def _place(self, rank: int, silent: Collection[int]) -> str:
        """Say where a rank was."""
        place, last = self._record(rank).place(), self._noted.last(rank)
        if rank in self.gone:
            return self.gone[rank] + last
        if rank not in self._pids:
            return "had not connected"
        return f"did not answer (it {place}{last} when last heard of)" if rank in silent else place + last


_NOTHING = Record()


def parse_call(value: Sequence[Any], ranks: str | None, world_size: int) -> Call:
    """Return the call that a message names, and the ranks that make it.

    Raises:
        Exception: If it names none, of whichever kind.
    """
    name, number = value
    return Call(str(name), int(number), None if ranks is None else _parse_ranks(ranks, world_size))


def _parse_told(value: Mapping[str, Any], world_size: int) -> Told:
    ranks = _parse_ranks(value["ranks"], world_size)
    left = value["left_seconds"]
    collective = Collective(
        str(value["group"]), int(value["number"]), None if len(ranks) == world_size else ranks, str(value["operation"])
    )
    return Told(
        collective=collective,
        tensors=tuple(str(each) for each in value["tensors"]),
        is_waiting=bool(value["is_waiting"]),
        left_seconds=None if left is None else float(left),
    )


@lru_cache(maxsize=1024)
def _parse_ranks(text: str, world_size: int) -> frozenset[int]:
    """Return the ranks that a text like ``"0 2 4"`` names; many ranks send the same text."""
    return frozenset(rank for rank in map(int, text.split()) if 0 <= rank < world_size)


def _includes(point: Call | Collective, rank: int) -> bool:
    return point.ranks is None or rank in point.ranks


def describe_places(places: Mapping[int, str]) -> str:
    """Return where each rank was, ranks at the same place together."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, place in sorted(places.items()):
        ranks[place].append(rank)
    groups = [f"{name_ranks(group)} {place}" for place, group in ranks.items()]
    more = [f"{len(groups) - _MAX_NAMED} other places"] if len(groups) > _MAX_NAMED else []
    return "; ".join(groups[:_MAX_NAMED] + more)


def describe_missing(places: Mapping[int, str]) -> str:
    """Say which ranks have not come to a call that timed out, and where they were; ``places`` holds only those."""
    if not places:
        return (
            "every rank has reached it, so ranks call different collectives in it, or one is too slow. Raise "
            "`timeout_seconds` in the launch if it may take that long."
        )
    missing = sorted(places)
    if len(missing) == 1:
        return f"{name_ranks(missing)} has not reached it; it {places[missing[0]]}. {_RULE}."
    return f"{name_ranks(missing)} have not reached it; {describe_places(places)}. {_RULE}."


def describe_ended(ended: Sequence[int], waiting: Sequence[int], point: Call | Collective) -> str:
    """Say that some ranks will never come to a call in which others wait."""
    return (
        f"{name_ranks(ended)} ended normally while {name_ranks(waiting)} {_verb(waiting, 'wait')} in {point}, which "
        f"{'it' if len(ended) == 1 else 'they'} never called. {_REMEDY} {_EXIT}"
    )


def describe_mismatch(points: Mapping[Call | Collective, Sequence[int]]) -> str:
    """Say that ranks wait for each other in different calls."""
    places = [
        f"{name_ranks(ranks)} {_verb(ranks, 'wait')} in {point}"
        for point, ranks in sorted(points.items(), key=lambda item: min(item[1]))
    ]
    return f"the ranks wait for each other in different calls: {', and '.join(places)}. {_REMEDY}"


def describe_differing(number: int, kinds: Mapping[tuple[str, ...], Sequence[int]]) -> str:
    """Say that ranks have called different collectives as the same one of a group."""
    parts = [
        f"{name_ranks(ranks)} {_verb(ranks, 'call')} `{operation}`" + (f" with {', '.join(tensors)}" if tensors else "")
        for (operation, *tensors), ranks in sorted(kinds.items(), key=lambda item: min(item[1]))
    ]
    return f"the ranks call different collectives as number {number} of their group: {', and '.join(parts)}. {_REMEDY}"


def describe_death(rank: int, how: str) -> str:
    """Say that a rank was lost that said nothing itself."""
    if how == "died":
        how = (
            "died without a traceback: killed by a signal, by the system because memory ran out, by a library that "
            "aborted (exit status -6: in a collective, gloo does so where ranks' tensors differ in size or dtype), or "
            "ended by its own code (`os._exit`)"
        )
    else:
        how = f"{how}: its machine or the network is down"
    return f"Booster: rank {rank} {how}."


def _verb(subjects: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(subjects) == 1 else verb
