"""`Pending`: a collective that was started and must be waited for; and a note of the waits for other ranks.

Second halves of collectives (`Stage`) are started in one order on every rank, whatever it waits for first.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Waits:
    """The waits of the main thread, for the monitor, which reads them from a thread of its own.

    Torch's flight recorder does not list sends and receives.

    Attributes:
        number: How many there have been.
    """

    __slots__ = ("_depth", "_main", "number")

    def __init__(self) -> None:
        self.number = 0
        self._depth = 0
        self.note_main()

    def note_main(self) -> None:
        """Note which thread is the main one: asking for it in each wait takes longer than most of them."""
        self._main = threading.main_thread().ident

    def wait_for(self, works: Sequence[Any]) -> None:
        """Wait for works, one after the other: one call where entering and leaving would be four."""
        if threading.get_ident() != self._main:
            for work in works:
                work.wait()
            return
        self.number += 1
        self._depth += 1
        try:
            for work in works:
                work.wait()
        finally:
            self._depth -= 1

    @property
    def is_in_one(self) -> bool:
        """Whether the main thread waits now."""
        return self._depth > 0

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self.number += 1
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._main:
            self._depth -= 1


WAITS = Waits()
"""Those of this process: ``with WAITS: work.wait()``."""
os.register_at_fork(after_in_child=WAITS.note_main)


_left: list[tuple[list[Any], Any]] = []
"""Works of collectives that nobody waits for any more, and what they write to."""


class Pending:
    """A collective that was started. Call `wait` to complete it; further calls do nothing.

    Args:
        works: Objects whose ``wait`` must return first.
        finish: Called once after that, on the waiting thread.
        keep: Kept alive until `wait` has returned.

    Leave the buffers of the collective alone until `wait` has returned.
    """

    def __init__(self, works: Sequence[Any] = (), finish: Callable[[], None] | None = None, keep: Any = None) -> None:
        self._works = list(works)
        self._finish = finish
        self._keep = keep

    def __del__(self) -> None:
        """Keep works that nobody has waited for, as of a model that is dropped before its step.

        A receive that ends with its object would leave its message to the next one.
        """
        if self._works:
            _left[:] = [each for each in _left if not all(map(_is_complete, each[0]))]
            _left.append((self._works, (self._finish, self._keep)))

    def wait(self) -> None:
        """Return once the result is there.

        Collective: none; the collective was entered when it was started.
        """
        works, self._works = self._works, []
        if works:
            WAITS.wait_for(works)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._keep = None


def _is_complete(work: Any) -> bool:
    ask = getattr(work, "is_completed", None)
    return ask is None or bool(ask())


class Stage:
    """The second half of one collective.

    Args:
        queue: Those of its group that have not started yet, in the order in which their collectives were started.
        start: Completes the first half, starts the second, and returns what to wait for.
    """

    def __init__(self, queue: deque[Stage], start: Callable[[], list[Any]]) -> None:
        self._queue = queue
        self._start: Callable[[], list[Any]] | None = start
        self._works: list[Any] = []
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return once the collective is complete; second halves before it are started first.

        Raises:
            BaseException: What one of its halves raised, whoever waited then.
        """
        while self._start is not None:
            self._queue.popleft().begin()
        if self._error is not None:
            raise self._error
        for work in self._works:
            work.wait()

    def begin(self) -> None:
        """Start it, and keep an error for `wait`.

        Collective: none; the collective was entered when it was started.
        """
        assert self._start is not None, "it leaves the queue when it starts"
        start, self._start = self._start, None
        try:
            self._works = start()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error


class Stages:
    """The second halves of a group's collectives; ranks may wait for the collectives in any order."""

    def __init__(self) -> None:
        self._queue: deque[Stage] = deque()

    def add(self, start: Callable[[], list[Any]]) -> Stage:
        """Append the second half of a collective whose first half was started.

        Collective: none; the collective was entered when it was started.
        """
        stage = Stage(self._queue, start)
        self._queue.append(stage)
        return stage
