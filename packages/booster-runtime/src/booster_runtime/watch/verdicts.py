"""Which failure came first, and whom to tell; pure decisions, without sockets or clocks.

When one rank fails, others soon fail of it, so the first failure is the one that is told. It is one of these: a rank
raised, a connection closed without a goodbye, a rank can't be reached, ranks wait for each other in different calls,
or they wait for one that has ended. On each host the lowest rank that goes on says it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from booster_runtime.watch.records import (
    Record,
    describe_death,
    describe_ended,
    describe_mismatch,
    describe_missing,
    describe_places,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from booster_runtime.watch.records import Call
    from booster_runtime.watch.wire import Message

ENDED = "ended normally"
_RANKS_PER_SECOND = 256
_FRESH_BEATS = 3.0
_MISMATCH_SECONDS = 5.0
_LATE_SHARE = 0.9
"""Share of the time limit after which a call is worth a line: at the limit, NCCL's watchdog ends processes unasked."""


def beat_seconds(world_size: int) -> float:
    """Return how often an idle rank says that it still waits: rarely where there are many, as one rank hears all."""
    return max(1.0, world_size / _RANKS_PER_SECOND)


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """A rank that has been idle in a call for some seconds, as it said at a time."""

    rank: int
    record: Record
    call: Call
    seconds: float
    at: float

    def needs(self, rank: int, record: Record) -> bool:
        """Return whether this waits for a rank whose record this is to make the same call."""
        return self.includes(rank) and not record.has_begun(self.call)

    def includes(self, rank: int) -> bool:
        """Return whether a rank takes part in the call."""
        return self.record.ranks is None or rank in self.record.ranks


class Verdicts:
    """The server's view of the run; times are seconds on any clock.

    Args:
        hosts: Host of each rank.
        timeout_seconds: Time limit of the run's collectives.
    """

    def __init__(self, hosts: Sequence[str], timeout_seconds: float = 600.0) -> None:
        self._hosts = list(hosts)
        self._timeout_seconds = timeout_seconds
        self._pids: dict[int, int] = {}
        self._alive: set[int] = set()
        self._records: dict[int, Record] = {}
        self._waits: dict[int, _Wait] = {}
        self._in_call: dict[int, tuple[Call, float]] = {}
        self._late: set[Call] = set()
        self._next_tick = 0.0
        self.gone: dict[int, str] = {}
        """How each rank went that makes no call any more."""
        self.failure: tuple[int | None, str] | None = None
        """The rank that failed first, or ``None`` where several disagree, and what happened."""

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

    def lost(self, rank: int, how: str = "died") -> None:
        """Take note that a connection has ended without a goodbye."""
        if rank not in self._alive:
            return
        self._alive.discard(rank)
        self.gone[rank] = how
        self._fail(rank, describe_death(rank, how))

    def ending(self, rank: int, record: Record) -> None:
        """Take note that a rank makes no call any more."""
        self._records[rank] = record
        self.gone[rank] = ENDED

    def left(self, rank: int) -> None:
        """Take note of a rank's goodbye."""
        self._alive.discard(rank)
        self.gone[rank] = ENDED

    def here(self, rank: int, record: Record, idle_seconds: float, now: float) -> str | None:
        """Take note of where a rank is; return a line where its call has nearly reached the time limit."""
        self._records[rank] = record
        self._waits.pop(rank, None)
        if record.call is None or rank in self.gone:
            self._in_call.pop(rank, None)
            return None
        if idle_seconds:
            self._waits[rank] = _Wait(rank=rank, record=record, call=record.call, seconds=idle_seconds, at=now)
        call, since = self._in_call.get(rank, (None, now))
        if call != record.call:
            self._in_call[rank] = record.call, now
        elif now - since >= _LATE_SHARE * self._timeout_seconds and record.call not in self._late:
            self._late.add(record.call)
            return (
                f"Booster: rank {rank} has been in `{record.call[0]}` #{record.call[1]} for {now - since:.3g} s; the "
                f"time limit is {self._timeout_seconds:g} s."
            )
        return None

    def tick(self, now: float) -> None:
        """Look, about once a second, for ranks that wait for what never comes.

        Ranks make the same calls in the same order. So one that has ended without a call never comes to it; and of
        two that wait in calls that the other has not come to, neither ever does. Ranks that take no part in a call may
        make it more or less often.
        """
        if not self._waits or now < self._next_tick:
            return
        self._next_tick = now + 1.0
        fresh_seconds = _FRESH_BEATS * beat_seconds(len(self._hosts))
        present = self.present
        waits = [w for r, w in sorted(self._waits.items()) if r in present and now - w.at <= fresh_seconds]
        self._waits = {wait.rank: wait for wait in waits}
        ended = [rank for rank, how in sorted(self.gone.items()) if how == ENDED]
        for wait in waits:
            never = [rank for rank in ended if wait.needs(rank, self._record(rank))]
            if never:
                mates = [w.rank for w in waits if (w.call, w.record.ranks) == (wait.call, wait.record.ranks)]
                self._fail(None, f"Booster: {describe_ended(never, mates, wait.call)}")
                return
        calls: dict[Call, list[_Wait]] = defaultdict(list)
        for wait in waits:
            if wait.seconds >= _MISMATCH_SECONDS:
                calls[wait.call].append(wait)
        for (call, some), (other_call, others) in combinations(calls.items(), 2):
            # Most have come to the other call as well, so that few pairs are left to look at.
            some_behind = [wait for wait in some if not wait.record.has_begun(other_call)]
            others_behind = [wait for wait in others if not wait.record.has_begun(call)]
            if any(a.includes(b.rank) and b.includes(a.rank) for a in some_behind for b in others_behind):
                # Ranks that came to one of these calls later, or were busy until now, are named with it too.
                in_call = {rank: call for rank, (call, _) in sorted(self._in_call.items()) if rank in present}
                places = {call: [rank for rank, other in in_call.items() if other == call] for call in calls}
                self._fail(None, f"Booster: {describe_mismatch(places)}")
                return

    def missing(self, call: Call, ranks: Collection[int] | None, silent: Collection[int]) -> str:
        """Say which ranks have not come to a call, of those that make it; ``silent`` ones have not answered."""
        asked = range(len(self._hosts)) if ranks is None else ranks
        missing = [rank for rank in asked if not self._record(rank).has_begun(call)]
        return describe_missing({rank: self._place(rank, silent) for rank in missing})

    def ended(self, asker: int, call: Call, ranks: Collection[int] | None) -> str | None:
        """Say which ranks have ended without coming to a call in which ``asker`` waits, if any."""
        asked = range(len(self._hosts)) if ranks is None else ranks
        never = [r for r in sorted(asked) if self.gone.get(r) == ENDED and not self._record(r).has_begun(call)]
        return describe_ended(never, [asker], call) if never else None

    def places(self, silent: Collection[int]) -> str:
        """Say where each rank was when last heard of."""
        return describe_places({rank: self._place(rank, silent) for rank in range(len(self._hosts))})

    def news(self, silent: Collection[int]) -> dict[int, Message]:
        """Return what to tell each rank of the failure."""
        assert self.failure is not None
        failed, what = self.failure
        who = "" if failed is None else f" Rank {failed} was process {self._pids[failed]} on {self._hosts[failed]}."
        text = f"{what}\nBooster: all {len(self._hosts)} ranks end.{who} Last calls: {self.places(silent)}.\n"
        told = {"type": "failure", "rank": failed, "text": text}
        lowest: dict[str, int] = {}
        for rank in sorted(self.present - {failed}):
            lowest.setdefault(self._hosts[rank], rank)
        speakers = set(lowest.values())
        return {rank: {**told, "speaks": rank in speakers} for rank in sorted(self._alive)}

    def _fail(self, rank: int | None, text: str) -> None:
        if self.failure is None:
            self.failure = rank, text

    def _record(self, rank: int) -> Record:
        return self._records.get(rank, _NOTHING)

    def _place(self, rank: int, silent: Collection[int]) -> str:
        """Say where a rank was."""
        place = self._record(rank).place()
        if self.gone.get(rank) == ENDED:
            return ENDED
        if rank in self.gone:
            return f"{self.gone[rank]} (it {place} when last heard of)"
        if rank not in self._pids:
            return "had not connected"
        return f"did not answer (it {place} when last heard of)" if rank in silent else place


_NOTHING = Record()
