"""Where ranks wait for each other, and errors that name the ranks that did not come.

Collectives can't name them. A `Meeting` can, because it goes through the process group's store. The meetings of a group
are numbered. The first rank that comes to one leaves the name of its call and the digest of its value. Each adds itself
to a list and to a count, and brings the error that it has. The last one decides that the meeting succeeded. The first
rank that reaches its time limit looks up who is missing and decides that it failed, as one does that comes with another
call. The first decision counts, by the store's compare-and-set, so all ranks agree.

A rank that comes to a failed meeting later raises at once if it makes the same call. Else it has left out a call that
others gave up waiting for: it passes over that number, so that one failure does not shift later meetings. Neither the
operations of a rank nor the keys that are left grow with the number of ranks or meetings, also where one is missing;
the list of those who came is read by one rank.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
import traceback
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from booster_core.errors import MissingRanksError, RankFailedError, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # torch does not list it as public

_MAX_NAMED = 10
_PAUSE_SECONDS = 0.0005, 0.25
"""The shortest and the longest pause between a rank's questions whether a meeting is decided, of few ranks."""
_QUESTION_SECONDS = 20e-6
"""About how long the process that serves the store works on one such question."""
_LOOKUP_SECONDS = 5.0
"""How long a rank that gives up waits for the one that has begun to look up who is missing."""
_NOTE_SECONDS = 30.0
_ERRORS, _DIFFERING = 1 << 20, 1 << 40
"""What a rank with an error, and one with another value than the first one's, adds to the count of those who came."""
_REMEDY = "It is a collective call: call it on every rank, not under `if rank == 0`."


class Outcome(NamedTuple):
    """What ranks learn in a meeting: the errors that they brought, lowest rank first, and whether digests differ."""

    errors: list[dict[str, Any]]
    differs: bool


class Meeting:
    """The meetings of one group of ranks, one after the other.

    Args:
        store: A store that all these ranks share; the keys below it belong to this object.
        rank: This process's rank in the world.
        ranks: The world ranks that meet, in the same order on each of them.
        gone_ranks: Returns ranks that are known to have ended, and how.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], gone_ranks: Callable[[], dict[int, str]] = dict
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._gone_ranks = gone_ranks
        self._numbers = itertools.count()
        self._last_name: str | None = None  # as the store has it

    def meet(
        self, name: str, *, digest: bytes = b"", error: Exception | None = None, timeout_seconds: float
    ) -> Outcome:
        """Wait until all ranks have come.

        Args:
            name: What the user called, the same on every rank; appears in messages.
            digest: Of a value that ranks compare.
            error: What went wrong on this rank, if anything.
            timeout_seconds: How long this rank waits for the others.

        Returns:
            What the ranks brought; the errors of 10 at most, each in the form of `describe_error` with its ``rank``.

        Raises:
            MissingRanksError: If ranks did not come in time or made other calls, or this rank comes after that.
            RankFailedError: If the process that served the store has ended.

        Collective: every rank of the group.
        """
        from torch.distributed import DistNetworkError, DistStoreError

        own = {"name": name, "digest": digest.hex(), "rank": self._rank}
        try:
            while True:
                number = next(self._numbers)
                verdict, is_late = self._attend(number, own, error, timeout_seconds)
                errors = self._read_errors(number, verdict.get("errors", 0))
                self._leave(number, verdict)
                if verdict["ok"]:
                    return Outcome(errors, bool(verdict["differs"]))
                if verdict.get("name", name) == name:
                    break
        except (DistNetworkError, DistStoreError) as lost:
            gone = self._gone_ranks()
            if 0 in gone:
                raise MissingRanksError(_gone_message(name, self._rank, {0: gone[0]})) from lost
            msg = (
                f"`{name}` could not meet the other ranks: the store that they share has gone away ({lost}). "
                "The process that held it, usually rank 0, has ended; its own output says why."
            )
            raise RankFailedError(msg) from lost
        raise MissingRanksError(_failure_message(name, self._rank, verdict, is_late=is_late))

    def refuse(self, reason: str) -> None:
        """Decide that the next meeting fails on every rank, unless all have come to it; their errors give the reason.

        Collective: none; this rank does not come to the meeting.
        """
        self._decide(next(self._numbers), {"ok": False, "reason": reason})

    def _attend(
        self, number: int, own: dict[str, Any], error: Exception | None, timeout_seconds: float
    ) -> tuple[dict[str, Any], bool]:
        """Come to a meeting; return what is decided about it, and whether that was so before this rank came."""
        store = self._store
        first = json.loads(store.compare_set(f"{number}/call", "", json.dumps(own)))
        if first["name"] != own["name"]:
            calls = [[call["rank"], call["name"]] for call in (first, own)]
            return self._decide(number, {"ok": False, "calls": calls}), False
        if error is not None:
            index = store.add(f"{number}/errors", 1)
            if index <= _MAX_NAMED:
                store.set(f"{number}/error/{index}", json.dumps({**describe_error(error), "rank": self._rank}))
        if own["name"] != self._last_name:
            store.set(f"last/{self._rank}", own["name"])
            self._last_name = own["name"]
        store.append(f"{number}/came", f"{self._rank} ")  # type: ignore[attr-defined] # torch does not list it
        # One request counts those who came, and among them those with errors, and with other values.
        own_count = 1 + (_ERRORS if error is not None else 0) + (_DIFFERING if first["digest"] != own["digest"] else 0)
        differing, rest = divmod(store.add(f"{number}/count", own_count), _DIFFERING)
        errors, came = divmod(rest, _ERRORS)
        if came == len(self._ranks):
            verdict = self._decide(number, {"ok": True, "errors": errors, "differs": differing > 0})
            return verdict, not verdict["ok"]
        is_late = store.check([f"{number}/done"])
        return self._wait(number, own["name"], timeout_seconds, speaks=first["rank"] == self._rank), is_late

    def _wait(self, number: int, name: str, timeout_seconds: float, *, speaks: bool) -> dict[str, Any]:
        """Return what is decided about a meeting, once it is.

        Args:
            number: That of the meeting, to which this rank has come.
            name: The call.
            timeout_seconds: When to give up.
            speaks: Whether this rank says who is missing meanwhile.
        """
        store, done = self._store, f"{number}/done"
        start = time.monotonic()
        deadline, has_given_up, num_gone = start + timeout_seconds, False, 0
        wait = LongWait()
        while not store.check([done]):
            now = time.monotonic()
            if now >= deadline:
                if has_given_up or store.add(f"{number}/gave up", 1) == 1:
                    return self._give_up(number, name, timeout_seconds)
                deadline, has_given_up = now + _LOOKUP_SECONDS, True
            if speaks:
                wait.note(lambda: self._describe_wait(number, name))
            gone = self._gone_ranks()
            if len(gone) > num_gone:
                num_gone = len(gone)
                missing = set(self._missing(number))
                gone = {rank: how for rank, how in gone.items() if rank in missing}
                if gone and not store.check([done]):
                    raise MissingRanksError(_gone_message(name, self._rank, gone))
            time.sleep(min(self._pause_after(now - start), max(deadline - now, 0.0)))
        decided: dict[str, Any] = json.loads(store.get(done))
        return decided

    def _pause_after(self, waited: float) -> float:
        """Return how long to leave the store alone after a wait of so many seconds.

        Short waits end soon, long ones cost little. With many ranks, the store would do nothing but answer them.
        """
        shortest, longest = _PAUSE_SECONDS
        of_all = len(self._ranks) * _QUESTION_SECONDS
        return max(min(waited / 10, max(longest, 4 * of_all)), shortest, of_all)

    def _give_up(self, number: int, name: str, timeout_seconds: float) -> dict[str, Any]:
        """Decide that the meeting failed because ranks are missing, unless the last one has come just now."""
        missing = self._missing(number)
        places = [[rank, self._last_call(rank)] for rank in missing[:_MAX_NAMED]]
        verdict = {"ok": False, "name": name, "by": self._rank, "seconds": timeout_seconds, "missing": places}
        decided = self._decide(number, {**verdict, "num_missing": len(missing), "world": len(self._ranks)})
        if decided["ok"]:
            self._store.delete_key(f"{number}/gave up")  # nobody does so where a meeting succeeds
        return decided

    def _decide(self, number: int, verdict: dict[str, Any]) -> dict[str, Any]:
        """Make ``verdict`` what is decided unless another rank has decided; return what is."""
        decided: dict[str, Any] = json.loads(self._store.compare_set(f"{number}/done", "", json.dumps(verdict)))
        return decided

    def _missing(self, number: int) -> list[int]:
        """Return the ranks that have not come to a meeting to which this one has; reads an entry for each that has."""
        came = {int(rank) for rank in self._store.get(f"{number}/came").split()}
        return [rank for rank in self._ranks if rank not in came]

    def _last_call(self, rank: int) -> str | None:
        """Return the call with which ``rank`` has come last, or ``None``."""
        key = f"last/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _describe_wait(self, number: int, name: str) -> str | None:
        """Return whom the meeting waits for."""
        missing = self._missing(number)
        return f"`{name}` waits for {name_ranks(missing)}" if missing else None

    def _read_errors(self, number: int, num_errors: int) -> list[dict[str, Any]]:
        keys = [f"{number}/error/{index + 1}" for index in range(min(num_errors, _MAX_NAMED))]
        return sorted((json.loads(self._store.get(key)) for key in keys), key=lambda error: int(error["rank"]))

    def _leave(self, number: int, verdict: dict[str, Any]) -> None:
        """Count this rank as gone from the meeting; the last one removes the meeting's keys."""
        store = self._store
        if store.add(f"{number}/left", 1) == len(self._ranks):
            keys = ["came", "count", "call", "done", "left"]
            if not verdict["ok"]:
                keys.append("gave up")
            if num_errors := verdict.get("errors", 0 if verdict["ok"] else _MAX_NAMED):
                keys += ["errors", *(f"error/{index + 1}" for index in range(min(num_errors, _MAX_NAMED)))]
            for key in keys:
                store.delete_key(f"{number}/{key}")


class Meetings:
    """The meetings of all groups that one sequence of calls makes.

    Work in the background, which meets while the main thread meets for other things, has a sequence of its own.

    Args:
        name: What tells this sequence from others; the same on every rank, and new.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.of_ranks: dict[tuple[int, ...], Meeting] = {}

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Let the meetings of this thread be of this sequence in a ``with`` block."""
        token = _of_thread.set(self)
        try:
            yield
        finally:
            _of_thread.reset(token)

    @staticmethod
    def of_thread() -> Meetings | None:
        """Return the sequence of this thread; ``None`` where it has no own one."""
        return _of_thread.get()


_of_thread: ContextVar[Meetings | None] = ContextVar("booster meetings of a thread", default=None)


def describe_error(error: Exception) -> dict[str, Any]:
    """Return an error in a form that travels."""
    return {
        "module": type(error).__module__,
        "type": type(error).__qualname__,
        # A KeyError's own text is a repr of what it was given.
        "text": str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


class LongWait:
    """Tells the log every half minute what this process still waits for."""

    def __init__(self) -> None:
        self._start = self._noted = time.monotonic()

    def note(self, describe: Callable[[], str | None]) -> None:
        """Log what ``describe`` returns, if it is time to and there is something to say."""
        now = time.monotonic()
        if now - self._noted >= _NOTE_SECONDS:
            self._noted = now
            if text := describe():
                extra = {"booster_any_rank": True}  # rank 0 may be the one that is waited for
                logging.getLogger("booster").warning("%s, %.0f s so far", text, now - self._start, extra=extra)


def _failure_message(name: str, rank: int, verdict: dict[str, Any], *, is_late: bool) -> str:
    """Say who waited for whom, or which calls ranks made instead, and what to do."""
    if "reason" in verdict:
        return f"`{name}`: {verdict['reason']}"
    if "calls" in verdict:
        calls = " and ".join(f"`{call}` on rank {where}" for where, call in verdict["calls"])
        return (
            f"`{name}` can't go on: ranks made different calls, {calls}. All of them are collective calls: make the "
            "same ones on every rank, in the same order, not under `if rank == 0`."
        )
    missing = [int(where) for where, _ in verdict["missing"]]
    # A rank that comes at the last moment may have put itself on the list, and is not counted yet.
    who = name_ranks(missing, int(verdict["num_missing"])) if missing else "a rank that came too late"
    waited = f"waited {verdict['seconds']:g} s for {who} of {verdict['world']}"
    if is_late or (rank in missing and rank != verdict["by"]):
        return (
            f"`{name}` has failed before rank {rank} came: rank {verdict['by']} {waited}. "
            "Raise `timeout_seconds` if this rank may take that long."
        )
    places: dict[str, list[int]] = {}
    for where, place in verdict["missing"]:
        if place:
            places.setdefault(place, []).append(int(where))
    elsewhere = "".join(
        f" {name_ranks(ranks).capitalize()} {'was' if len(ranks) == 1 else 'were'} last seen in `{place}`."
        for place, ranks in places.items()
    )
    return f"`{name}` {waited}, which did not call it.{elsewhere} {_REMEDY}"


def _gone_message(name: str, rank: int, gone: dict[int, str]) -> str:
    """Say that ranks will never come."""
    who = "; ".join(f"rank {other} {how}" for other, how in sorted(gone.items()))
    return f"{who}, while rank {rank} waits in `{name}`. {_REMEDY}"
