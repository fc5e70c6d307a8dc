"""How long this process has waited in one call, as opposed to having computed in it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

LOOK_SECONDS = 1.0
"""How often to look."""
_BUSY_SHARE = 0.3
"""Share of a processor that threads which only wait take, at most."""


class Idleness:
    """How long this process has done next to nothing in one call."""

    def __init__(self) -> None:
        self._call: tuple[str, int] | None = None
        self._since = self._at = self._busy = 0.0

    def look(self, call: tuple[str, int] | None, now: float, busy: float, *, is_waiting: bool) -> float:
        """Return for how many seconds the process has been idle in ``call``; to be called every `LOOK_SECONDS`.

        Args:
            call: The call that the process is in.
            now: Seconds on any clock.
            busy: Seconds for which it has computed, or could have; see `busy_seconds`.
            is_waiting: Whether it is known to wait for other ranks.
        """
        if call is None or call != self._call:
            self._call, self._since, self._at, self._busy = call, now, now, busy
            return 0.0
        if now - self._at >= LOOK_SECONDS / 2:
            if not is_waiting and busy - self._busy > _BUSY_SHARE * (now - self._at):
                self._since = now
            self._at, self._busy = now, busy
        return self._at - self._since


def busy_seconds() -> float:
    """Return for how long this process has computed, and its main thread has waited for a processor to."""
    queued = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        queued = int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    return time.process_time() + queued
