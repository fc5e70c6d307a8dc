"""`RankWatch`: a replica group is alive only while all of its ranks are.

The lighthouse hears of a group from its first rank alone. If another rank stops, that one waits in a collective and
goes on to be heard, and all other groups would wait for it. So ranks watch each other, and end with a rank that stops.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch does not list it as public

_EXIT_CODE = 77
_ENDED = 1 << 40
_LAST_SECONDS = 2.0
_PATIENCE = 4
"""Further ticks without an answer, since rank 0 may just have ended as this rank is about to."""


class RankWatch:
    """A thread that ends this process once another rank of its group shows no sign of life.

    It counts its own ticks, not time: a group that was stopped as a whole goes on.

    Args:
        host: Of the group's store.
        port: Of the group's store.
        rank: This rank.
        world_size: Number of ranks in the group; one is not watched.
        timeout_seconds: The group's time limit; a rank that is silent for a third of it counts as stopped.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._others = [other for other in range(world_size) if other != rank]
        self._rank, self._num_ticks = rank, max(3, int(timeout_seconds / 3))
        self._end = threading.Event()
        if not self._others:
            return
        # A connection of its own: a call of the store keeps it until the answer is there.
        self._store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self._num_ticks)
        )
        self._store.add(f"alive/{rank}", 1)
        self._counts: dict[int, int] = {}
        # Two threads: a call of the store does not return while rank 0, whose store it is, is stopped.
        self._asking = threading.Thread(target=self._ask, name="booster-ft signs of life", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="booster-ft rank watch", daemon=True)
        self._asking.start()
        self._watching.start()

    def close(self) -> None:
        """Stop watching, and let the others know that this rank ends by its own decision."""
        self._end.set()
        if self._others:
            self._watching.join()
            self._asking.join(_LAST_SECONDS)

    def _ask(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 has ended
            while not self._end.wait(1.0):
                self._store.add(f"alive/{self._rank}", 1)
                self._counts = {other: self._store.add(f"alive/{other}", 0) for other in self._others}
            self._store.add(f"alive/{self._rank}", -_ENDED)

    def _watch(self) -> None:
        seen: dict[int, int] = {}
        silent, unanswered = dict.fromkeys(self._others, 0), 0
        while not self._end.wait(1.0):
            counts = self._counts
            unanswered = unanswered + 1 if counts is seen else 0
            for other, count in () if counts is seen else counts.items():
                # Before its first sign a rank may still be starting; below zero it has ended by its own decision.
                silent[other] = silent[other] + 1 if count > 0 and seen.get(other) == count else 0
            seen = counts
            stopped = [other for other in self._others if silent[other] >= self._num_ticks]
            if unanswered >= self._num_ticks + _PATIENCE:
                _leave("its rank 0 has ended or stopped")
            if stopped:
                _leave(f"rank(s) {', '.join(map(str, stopped))} gave no sign of life for {self._num_ticks} s")


def _leave(why: str) -> None:
    print(f"Booster: this replica group ends, since {why}. Restart it: it catches up.", file=sys.stderr, flush=True)  # noqa: T201 - the process ends here
    os._exit(_EXIT_CODE)
