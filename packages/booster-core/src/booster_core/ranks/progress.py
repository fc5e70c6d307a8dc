"""How far this process has come through the calls that all ranks make, and what to say when one does not come along.

The record costs a few attribute writes per call and no communication. Only when a collective has timed out are the
others' records asked for, through the monitor.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from booster_core.errors import BoosterError, MissingRanksError
from booster_core.ranks.rendezvous import name_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_MAX_NAMED = 10
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited|remote end closed|"
    r"store that they share has gone away|failed to recv, got 0 bytes|nccl.*remote|its memory can't be read any more",
    re.IGNORECASE,
)
"""What is raised where another rank's process has gone."""
ENDED = "has ended normally"
_REMEDY = (
    "Every rank must make the same calls in the same order: not under `if rank == 0`, and with as many batches on each."
)


class Progress:
    """The calls that this process has entered and finished."""

    __slots__ = ("call", "counts", "is_finished", "is_waiting", "last", "ranks")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.call: tuple[str, int] | None = None
        self.ranks: Sequence[int] | None = None
        self.is_waiting = False
        self.last: tuple[str, int] | None = None
        self.is_finished = True

    def enter(self, name: str, ranks: Sequence[int] | None = None) -> int:
        """Note that the call ``name`` begins, and return how often it has begun.

        Args:
            name: The call.
            ranks: The ranks that it may wait for; by default, all.
        """
        count = self.counts.get(name, 0) + 1
        self.counts[name] = count
        self.last = (name, count)
        self.is_finished = False
        if self.call is None:
            self.call, self.ranks = self.last, ranks
        return count

    def finish(self, name: str) -> None:
        """Note that the last call ``name`` has ended."""
        self.last = (name, self.counts[name])
        self.is_finished = True
        self.leave(name)

    def leave(self, name: str) -> None:
        """Note that the last call ``name`` is not waited in any more, however it went."""
        if self.call is not None and self.call[0] == name:
            self.call = self.ranks = None

    def clear(self) -> None:
        """Forget everything: a new process group begins."""
        self.__init__()  # type: ignore[misc] # the constructor says what nothing is

    def record(self) -> dict[str, Any]:
        """Return the record in a form that travels."""
        return {
            "counts": dict(self.counts),
            "last": self.last,
            "finished": self.is_finished,
            "call": self.call,
            "ranks": None if self.ranks is None else list(self.ranks),
        }


PROGRESS = Progress()
"""The record of this process; counting starts anew with each process group."""


class naming_missing_ranks:  # noqa: N801 - reads as what a with statement does
    """Context around a call with collectives: if they time out, raise an error that names the ranks that did not come.

    Args:
        name: The call as the user knows it, such as ``"step"``.
        ranks: The ranks that take part, where others need not make the call as often; by default, all.

    Raises:
        MissingRanksError: In place of torch's timeout.

    Collective: none of its own.
    """

    __slots__ = ("_count", "_name", "_ranks", "_start")

    def __init__(self, name: str, ranks: Sequence[int] | None = None) -> None:
        self._name = name
        self._ranks = ranks

    def __enter__(self) -> None:
        self._count = PROGRESS.enter(self._name, self._ranks)
        self._start = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            PROGRESS.finish(self._name)
            return
        PROGRESS.leave(self._name)
        if not isinstance(error, RuntimeError) or isinstance(error, BoosterError):
            return
        if _TIMEOUT.search(str(error)):
            seconds = time.monotonic() - self._start
            raise MissingRanksError(_explain(self._name, self._count, self._ranks, seconds)) from error
        if LOST_PEER.search(str(error)):
            ended = _ended_before(self._name, self._count, self._ranks)
            if ended:
                raise MissingRanksError(describe_ended(ended, [current_rank()], self._name, self._count)) from error


def _explain(name: str, count: int, ranks: Sequence[int] | None, seconds: float) -> str:
    from booster_core.ranks.world import current_world

    world = current_world()
    start = f"`{name}` #{count} timed out after {seconds:.3g} s"
    records = None if world.monitor is None else world.monitor.ask_progress()
    if records is None:
        return (
            f"{start}: some ranks of {world.world_size} did not reach it, or are too slow; which ones is not known, "
            "because this run was not started by `booster_core.launch`, or rank 0 has ended."
        )
    return describe_progress(start, name, count, _of(ranks, records))


def _of(ranks: Sequence[int] | None, records: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the records of some ranks."""
    return {rank: record for rank, record in records.items() if ranks is None or rank in ranks}


def current_rank() -> int:
    """Return this process' rank.

    Collective: none.
    """
    from booster_core.ranks.world import current_world

    return current_world().rank


def _ended_before(name: str, count: int, ranks: Sequence[int] | None) -> list[int]:
    """Return the ranks that have ended normally without having come to a call."""
    from booster_core.ranks.world import current_world

    monitor = current_world().monitor
    records = (None if monitor is None else monitor.ask_progress()) or {}
    return sorted(
        rank
        for rank, record in _of(ranks, records).items()
        if record.get("gone") == ENDED and record.get("counts", {}).get(name, 0) < count
    )


def describe_ended(ended: Sequence[int], waiting: Sequence[int], name: str, count: int) -> str:
    """Say that some ranks will never come to a call in which others wait.

    Collective: none.
    """
    wait = "waits" if len(waiting) == 1 else "wait"
    return (
        f"{name_ranks(ended)} ended normally while {name_ranks(waiting)} {wait} in `{name}` #{count}, which "
        f"{'it' if len(ended) == 1 else 'they'} never called. {_REMEDY}"
    )


def describe_mismatch(calls: Mapping[tuple[str, int], Sequence[int]]) -> str:
    """Say that ranks wait for each other in different calls.

    Collective: none.
    """
    places = [
        f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in `{name}` #{count}"
        for (name, count), ranks in sorted(calls.items(), key=lambda item: min(item[1]))
    ]
    return f"the ranks wait for each other in different calls: {', and '.join(places)}. {_REMEDY}"


def describe_progress(start: str, name: str, count: int, records: Mapping[int, Mapping[str, Any]]) -> str:
    """Say which ranks have not reached call ``count`` of ``name``, and where they are.

    Args:
        start: Beginning of the sentence.
        name: The call that timed out.
        count: Which of the calls of that name.
        records: What each rank answered: its `Progress.record`, or ``{"gone": how}``.

    Collective: none.
    """
    places: dict[str, list[int]] = {}
    missing = []
    for rank, record in sorted(records.items()):
        if record.get("counts", {}).get(name, 0) < count:
            missing.append(rank)
            places.setdefault(_place(record), []).append(rank)
    if not missing:
        return (
            f"{start} although every rank has reached it: ranks call different collectives in it, or one is too slow. "
            "Raise `timeout_seconds` in the launch if it may take that long."
        )
    have = "has" if len(missing) == 1 else "have"
    if len(places) == 1 and len(missing) == 1:
        details = f" it {next(iter(places))}."
    else:
        details = "".join(f" {name_ranks(ranks)} {place};" for place, ranks in list(places.items())[:_MAX_NAMED])
        details = details.removesuffix(";") + "."
    return (
        f"{start}: {name_ranks(missing)} {have} not reached it;{details} "
        "Every rank must make the same calls in the same order."
    )


def _place(record: Mapping[str, Any]) -> str:
    """Say where a rank is."""
    if "gone" in record:
        return str(record["gone"])
    last = record.get("last")
    if last is None:
        return "made no such call yet"
    return f"{'last finished' if record['finished'] else 'entered'} `{last[0]}` #{last[1]}"
