"""Second halves of collectives, which every rank starts in one order whatever it waits for first."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


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
