"""How far this process has come through the calls that all ranks make.

The record costs a few attribute writes per call and no communication. Only when a collective has timed out is the
monitor asked where the others are.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from booster_core.errors import BoosterError, MissingRanksError
from booster_core.ranks.world import current_world

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited|remote end closed|"
    r"store that they share has gone away|failed to recv, got 0 bytes|nccl.*remote|its memory can't be read any more",
    re.IGNORECASE,
)
"""What is raised where another rank's process has gone."""


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
        """Note that the call ``name`` begins, and return its number.

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
"""The record of this process; each process group starts counting from zero."""


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
        world = current_world()
        missing = None
        if _TIMEOUT.search(str(error)):
            if world.monitor is not None:
                missing = world.monitor.describe_missing(self._name, self._count, self._ranks)
            if missing is None:
                missing = (
                    f"some ranks of {world.world_size} did not reach it, or are too slow; which ones is not known, "
                    "because no monitor watches this run (see `booster_core.launch`), or rank 0 has ended."
                )
            seconds = time.monotonic() - self._start
            msg = f"`{self._name}` #{self._count} timed out after {seconds:.3g} s: {missing}"
            raise MissingRanksError(msg) from error
        if LOST_PEER.search(str(error)) and world.monitor is not None:
            missing = world.monitor.describe_missing(self._name, self._count, self._ranks, only_ended=True)
            if missing is not None:
                raise MissingRanksError(missing) from error
