"""Where ranks wait for each other, and errors that name the ranks that did not come.

Collectives can't name them (`booster_core.ranks.calls` asks the monitor). `Rendezvous` is a meeting through the process
group's store, which can.

A meeting is identified by its name and the number of meetings of that name before it. Each rank announces itself under
a key of its own and adds itself to a count; the last one decides that the meeting succeeded. A rank that reaches its
time limit tries to decide that it failed. The first decision counts, by the store's compare-and-set, so all ranks
agree; ranks that come to a failed meeting later raise at once.

A rank that never came to a failed meeting learns of it at the group's next successful meeting and counts it as passed,
so that one failure does not shift later meetings against each other. Without failures, neither the work per rank nor
the keys left in the store grow with the number of ranks or meetings.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from booster_core.errors import MissingRanksError, RankFailedError, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # torch does not list it as public

_MAX_NAMED = 10
_SHORTEST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.25
_NOTE_SECONDS = 30.0
_REMEDY = "It is a collective call: call it on every rank, not under `if rank == 0`."


class Rendezvous:
    """The meetings of one group of ranks.

    Args:
        store: A store that all these ranks share; the keys below it belong to this object.
        rank: This process's rank in the world.
        ranks: The world ranks that meet, in the same order on each of them.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._counts: Counter[str] = Counter()
        self._known_failures = 0
        self._lock = threading.Lock()

    def meet(
        self,
        name: str,
        timeout_seconds: float,
        problem: dict[str, Any] | None = None,
        gone_ranks: Callable[[], dict[int, str]] = dict,
    ) -> list[dict[str, Any]]:
        """Wait until all ranks have come to the meeting ``name``.

        Args:
            name: What the user called; appears in messages.
            timeout_seconds: How long this rank waits for the others.
            problem: JSON-serialisable report that this rank brings, if any.
            gone_ranks: Returns ranks that are known to have ended, and how.

        Returns:
            The reports that ranks brought, each with its ``rank``, lowest rank first; at most 10 of them.

        Raises:
            MissingRanksError: If ranks did not come in time, or this rank comes after others gave up.
            RankFailedError: If the process that served the store has ended.

        Collective: every rank of the group.
        """
        with self._lock:
            meeting = f"{name}#{self._counts[name]}"
            self._counts[name] += 1
        from torch.distributed import DistNetworkError, DistStoreError

        try:
            outcome, is_late = self._attend(name, meeting, timeout_seconds, problem, gone_ranks)
            if outcome["ok"]:
                self._catch_up(int(outcome["failures"]))
            problems = self._read_problems(meeting, int(outcome.get("problems", 0)))
            self._leave(meeting)
        except (DistNetworkError, DistStoreError) as error:
            if 0 in gone_ranks():
                raise MissingRanksError(_gone_message(name, self._rank, {0: gone_ranks()[0]})) from error
            msg = (
                f"`{name}` could not meet the other ranks: the store that they share has gone away ({error}). "
                "The process that held it, usually rank 0, has ended; its own output says why."
            )
            raise RankFailedError(msg) from error
        if outcome["ok"]:
            return problems
        raise MissingRanksError(_failure_message(name, self._rank, outcome, is_late=is_late))

    def _attend(
        self,
        name: str,
        meeting: str,
        timeout_seconds: float,
        problem: dict[str, Any] | None,
        gone_ranks: Callable[[], dict[int, str]],
    ) -> tuple[dict[str, Any], bool]:
        """Add this rank to the count; return the outcome, and whether it was decided before this rank came."""
        store, done = self._store, f"{meeting}/done"
        if problem is not None:
            index = store.add(f"{meeting}/problems", 1)
            store.set(f"{meeting}/problem/{index}", json.dumps({**problem, "rank": self._rank}))
        store.set(f"at/{self._rank}", meeting)
        if store.add(f"{meeting}/count", 1) == len(self._ranks):
            failures, problems = store.add("failures", 0), store.add(f"{meeting}/problems", 0)
            outcome = self._decide(meeting, {"ok": True, "failures": failures, "problems": problems})
            return outcome, not outcome["ok"]
        is_late = store.check([done])
        start = time.monotonic()
        wait = LongWait()
        while not store.check([done]):
            waited = time.monotonic() - start
            wait.note(lambda: self._describe_wait(name, meeting))
            if waited >= timeout_seconds:
                return self._give_up(meeting, timeout_seconds), False
            gone = {rank: how for rank, how in gone_ranks().items() if rank in self._ranks}
            gone = {rank: how for rank, how in gone.items() if self._place_of(rank) != meeting}
            if gone and not store.check([done]):
                raise MissingRanksError(_gone_message(name, self._rank, gone))
            # Pauses grow with the wait: short waits end soon, and long ones leave the store alone.
            pause = min(max(waited / 10, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS, timeout_seconds - waited)
            time.sleep(pause)
        return json.loads(store.get(done)), is_late

    def _give_up(self, meeting: str, timeout_seconds: float) -> dict[str, Any]:
        """Find the missing ranks and decide that the meeting failed, unless its last rank came just now."""
        places = {rank: place for rank in self._ranks if (place := self._place_of(rank)) != meeting}
        missing = [
            {"rank": rank, "place": place and place.rpartition("#")[0], "inside": self._is_waiting_in(place)}
            for rank, place in list(places.items())[:_MAX_NAMED]
        ]
        index = self._store.add("failures", 1)
        self._store.set(f"failure/{index}", meeting)
        verdict = {"ok": False, "failures": index, "by": self._rank, "seconds": timeout_seconds, "missing": missing}
        return self._decide(meeting, {**verdict, "num_missing": len(places), "world": len(self._ranks)})

    def _decide(self, meeting: str, verdict: dict[str, Any]) -> dict[str, Any]:
        """Make ``verdict`` the outcome unless another rank has decided; return what is decided."""
        decided: dict[str, Any] = json.loads(self._store.compare_set(f"{meeting}/done", "", json.dumps(verdict)))
        return decided

    def _place_of(self, rank: int) -> str | None:
        """Return the meeting that ``rank`` has come to last, or ``None``."""
        key = f"at/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _describe_wait(self, name: str, meeting: str) -> str | None:
        """Return whom the meeting waits for, on the first rank that has come; ``None`` on others."""
        if any(self._place_of(rank) == meeting for rank in self._ranks[: self._ranks.index(self._rank)]):
            return None
        return f"`{name}` waits for {name_ranks([each for each in self._ranks if self._place_of(each) != meeting])}"

    def _is_waiting_in(self, meeting: str | None) -> bool:
        return (
            meeting is not None
            and self._store.check([f"{meeting}/count"])
            and not self._store.check([f"{meeting}/done"])
        )

    def _catch_up(self, num_failures: int) -> None:
        """Count failed meetings that this rank never came to as passed."""
        with self._lock:
            first, self._known_failures = self._known_failures, max(num_failures, self._known_failures)
        for index in range(first + 1, num_failures + 1):
            key = f"failure/{index}"
            if self._store.check([key]):
                name, _, count = self._store.get(key).decode().rpartition("#")
                with self._lock:
                    self._counts[name] = max(self._counts[name], int(count) + 1)

    def _read_problems(self, meeting: str, num_problems: int) -> list[dict[str, Any]]:
        keys = [f"{meeting}/problem/{index + 1}" for index in range(min(num_problems, _MAX_NAMED))]
        return sorted((json.loads(self._store.get(key)) for key in keys), key=lambda problem: int(problem["rank"]))

    def _leave(self, meeting: str) -> None:
        """Count this rank as gone from the meeting; the last one removes the meeting's keys."""
        if self._store.add(f"{meeting}/left", 1) == len(self._ranks):
            for index in range(self._store.add(f"{meeting}/problems", 0)):
                self._store.delete_key(f"{meeting}/problem/{index + 1}")
            for key in ("problems", "count", "done", "left"):
                self._store.delete_key(f"{meeting}/{key}")


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


def _failure_message(name: str, rank: int, outcome: dict[str, Any], *, is_late: bool) -> str:
    """Say who waited for whom, where the missing ranks are, and what to do."""
    missing = [int(entry["rank"]) for entry in outcome["missing"]]
    # A rank that comes at the last moment has announced itself and is not counted yet.
    who = name_ranks(missing, int(outcome["num_missing"])) if missing else "a rank that came too late"
    waited = f"waited {outcome['seconds']:g} s for {who} of {outcome['world']}"
    if is_late or (rank in missing and rank != outcome["by"]):
        return (
            f"`{name}` has failed before rank {rank} came: rank {outcome['by']} {waited}. "
            "Raise `timeout_seconds` if this rank may take that long."
        )
    places: dict[tuple[bool, str], list[int]] = {}
    for entry in outcome["missing"]:
        if entry["place"]:
            places.setdefault((entry["inside"], entry["place"]), []).append(int(entry["rank"]))
    elsewhere = ""
    for (is_inside, place), ranks in places.items():
        verb = ("is" if is_inside else "was") if len(ranks) == 1 else ("are" if is_inside else "were")
        elsewhere += f" {name_ranks(ranks).capitalize()} {verb} {'waiting' if is_inside else 'last seen'} in `{place}`."
    return f"`{name}` {waited}, which did not call it.{elsewhere} {_REMEDY}"


def _gone_message(name: str, rank: int, gone: dict[int, str]) -> str:
    """Say that ranks will never come."""
    who = "; ".join(f"rank {other} {how}" for other, how in sorted(gone.items()))
    return f"{who}, while rank {rank} waits in `{name}`. {_REMEDY}"
