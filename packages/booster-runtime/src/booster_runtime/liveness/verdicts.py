"""Which failure came first, who says so, and in which order processes end; pure decisions, without sockets or clocks.

When one rank fails, others soon fail of it: their connections break. The first failure that does not look like such a
consequence is the primary one. On its own host the failing rank itself prints its traceback; on every other host, and
where a rank died without a word, the lowest rank that lives speaks for it. Speakers end last, so that nothing is
printed after them; but under torchrun, whose agent kills the others and reports on the first process that ends, they
end first. Rank 0 holds the monitor's server and stays until those before it are gone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.ranks import ENDED, describe_ended, describe_mismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_runtime.liveness.wire import Message

HOLD_SECONDS = 1.0
"""How long a failure that looks like a consequence waits for its cause to be reported."""


DISAGREE = "disagree"
"""How a run fails whose ranks wait for each other in different calls, or for one that has ended."""

_MISMATCH_SECONDS = 5.0
_FRESH_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """A rank that does nothing in a call, as it said at a time, and how far it had come through all calls."""

    call: tuple[str, int]
    ranks: frozenset[int] | None
    """The ranks that make this call together; ``None`` for all."""
    counts: dict[str, int]
    seconds: float
    at: float

    def needs(self, rank: int, counts: dict[str, int]) -> bool:
        """Return whether a rank that has come so far is still to make this call."""
        name, count = self.call
        return (self.ranks is None or rank in self.ranks) and counts.get(name, 0) < count


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs."""

    host: str
    pid: int


class Verdicts:
    """The server's view of the run.

    Every method returns the messages to send, as pairs of rank and message; times are seconds on any clock.

    Args:
        hosts: Host of each rank.
        speakers_end_first: Whether an agent reports on the first process that ends.
    """

    def __init__(self, hosts: Sequence[str], *, speakers_end_first: bool) -> None:
        self._hosts = list(hosts)
        self._speakers_end_first = speakers_end_first
        self._places: dict[int, Place] = {}
        self._alive: set[int] = set()
        self._gone: dict[int, str] = {}
        self._held: list[tuple[float, int, str]] = []
        self._primary: int | None = None
        self._how: str | None = None
        self._final_counts: dict[int, dict[str, int]] = {}
        self._waits: dict[int, _Wait] = {}
        self._text: str | None = None
        self._waiting: set[int] = set()
        self._first: set[int] = set()

    @property
    def gone(self) -> dict[int, str]:
        """How each rank that is no longer connected went."""
        return dict(self._gone)

    @property
    def is_holding(self) -> bool:
        """Whether a failure waits for its cause."""
        return bool(self._held)

    def joined(self, rank: int, pid: int) -> list[tuple[int, Message]]:
        """A rank has connected; it learns whether it speaks for a lost rank 0, and of a failure before it came."""
        self._places[rank] = Place(host=self._hosts[rank], pid=pid)
        self._alive.add(rank)
        is_heir = rank == next((r for r, host in enumerate(self._hosts) if r and host == self._hosts[rank]), None)
        welcome: list[tuple[int, Message]] = [(rank, {"type": "welcome", "is_heir": is_heir})]
        if self._primary is None:
            return welcome
        self._first.add(rank)
        if rank == 0:
            self._waiting.add(0)
        return [*welcome, self._news(rank, speaks=False), *self._turns()]

    def failed(self, rank: int, text: str, now: float, *, is_derived: bool) -> list[tuple[int, Message]]:
        """A rank has raised; ``is_derived`` says that its error looks like a consequence of another's end."""
        if self._primary is not None:
            return []  # it has been told
        if is_derived:
            self._held.append((now, rank, text))
            return []
        return self._decide(rank, text)

    def lost(self, rank: int, how: str = "has died") -> list[tuple[int, Message]]:
        """A rank's connection has closed without a goodbye; or it could not be reached for as long as it may."""
        if rank not in self._alive:
            return []
        self._alive.discard(rank)
        self._gone[rank] = how
        if self._primary is not None:
            return self._turns()
        held = next((text for _, held_rank, text in self._held if held_rank == rank), None)
        return self._decide(rank, held)

    @property
    def final_counts(self) -> dict[int, dict[str, int]]:
        """How often each rank that ends normally has made each call."""
        return self._final_counts

    def ending(self, rank: int, record: Message) -> list[tuple[int, Message]]:
        """A rank is about to end normally; it makes no call any more."""
        self._gone[rank] = ENDED
        self._final_counts[rank] = _counts_in(record)
        return []

    def waits(self, rank: int, record: Message, seconds: float, now: float) -> list[tuple[int, Message]]:
        """A rank has been idle in a call for so long, and says so again as long as it is.

        Ranks make the same calls in the same order. So one that has ended without a call never comes to it; and of
        two that wait in calls that the other has not come to, neither ever does. Ranks that take no part in a call may
        make it more or less often.
        """
        call = record.get("call")
        if self._primary is not None or rank in self._gone or not isinstance(call, (list, tuple)) or len(call) != 2:
            return []
        mine = self._waits[rank] = _Wait(
            call=(str(call[0]), int(call[1])),
            ranks=_ranks_in(record),
            counts=_counts_in(record),
            seconds=seconds,
            at=now,
        )
        fresh = {
            other: wait
            for other, wait in sorted(self._waits.items())
            if now - wait.at <= _FRESH_SECONDS and other in self._alive and other not in self._gone
        }
        ended = sorted(r for r, counts in self._final_counts.items() if mine.needs(r, counts))
        if ended:
            waiting = [other for other, wait in fresh.items() if (wait.call, wait.ranks) == (mine.call, mine.ranks)]
            return self._disagree(describe_ended(ended, waiting, *mine.call), rank)
        calls: dict[tuple[str, int], list[int]] = defaultdict(list)
        for other, wait in fresh.items():
            calls[wait.call].append(other)
        for other, wait in fresh.items():
            is_mutual = mine.needs(other, wait.counts) and wait.needs(rank, mine.counts)
            if is_mutual and min(wait.seconds, seconds) >= _MISMATCH_SECONDS:
                return self._disagree(describe_mismatch(calls), rank)
        return []

    def _disagree(self, text: str, rank: int) -> list[tuple[int, Message]]:
        self._how = DISAGREE
        return self._decide(rank, text)

    def left(self, rank: int) -> list[tuple[int, Message]]:
        """A rank has said goodbye: it ended normally."""
        self._alive.discard(rank)
        self._gone[rank] = ENDED
        return self._turns() if self._primary is not None else []

    def tick(self, now: float) -> list[tuple[int, Message]]:
        """Time has passed; a failure whose cause did not show up is a cause itself."""
        if self._held and self._primary is None and now - self._held[0][0] >= HOLD_SECONDS:
            _, rank, text = self._held[0]
            return self._decide(rank, text)
        return []

    def _decide(self, rank: int, text: str | None) -> list[tuple[int, Message]]:
        """Make a rank's failure the primary one and tell everyone what to do."""
        self._primary = rank
        self._held.clear()
        place = self._places[rank]
        speaks_itself = rank in self._alive and text is not None
        speakers = {rank} if speaks_itself else set()
        to_end = self._alive - self._gone.keys()  # not those that end normally
        for host in dict.fromkeys(self._hosts):
            if not (speaks_itself and host == place.host):
                speakers.update([r for r in sorted(to_end) if self._hosts[r] == host][:1])
        others = to_end - speakers
        self._first, second = (speakers, others) if self._speakers_end_first else (others, speakers)
        self._waiting = second | ({0} & self._alive)
        self._text = text
        return [self._news(r, speaks=r in speakers) for r in sorted(self._alive)] + self._turns()

    def _news(self, to: int, *, speaks: bool) -> tuple[int, Message]:
        """Return what a rank is told of the failure."""
        assert self._primary is not None
        return to, {
            "type": "failure",
            "rank": self._primary,
            "world": len(self._hosts),
            "host": self._places[self._primary].host,
            "pid": self._places[self._primary].pid,
            "how": self._how or self._gone.get(self._primary, "has failed"),
            "text": self._text,
            "speaks": speaks,
            "waits": to in self._waiting,
            "own": to == self._primary,
        }

    def _turns(self) -> list[tuple[int, Message]]:
        """Tell ranks that wait for others to end that these have."""
        first = self._first & self._alive
        ready = {r for r in self._waiting if not first - {r}}
        self._waiting -= ready
        return [(r, {"type": "go"}) for r in sorted(ready)]


def _ranks_in(record: Message) -> frozenset[int] | None:
    ranks = record.get("ranks")
    return frozenset(int(rank) for rank in ranks) if isinstance(ranks, (list, tuple)) else None


def _counts_in(record: Message) -> dict[str, int]:
    counts = record.get("counts")
    return {str(name): int(count) for name, count in counts.items()} if isinstance(counts, dict) else {}
