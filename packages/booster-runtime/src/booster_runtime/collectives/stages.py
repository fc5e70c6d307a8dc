"""Second halves of collectives, which every rank starts in one order whatever it waits for first."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_HELP_SECONDS = 0.02


class Stage:
    """The second half of one collective.

    Args:
        stages: The queue in which it waits its turn.
        start: Completes the first half, starts the second, and returns what to wait for.
    """

    def __init__(self, stages: Stages, start: Callable[[], list[Any]]) -> None:
        self._stages, self._start = stages, start
        self._works: list[Any] = []
        self._error: BaseException | None = None
        self.has_started = False

    def start(self) -> None:
        """Start it, and keep an error for `wait`."""
        try:
            self._works = self._start()
        except BaseException as error:  # noqa: BLE001 - raised on the thread that waits
            self._error = error
        finally:
            self.has_started = True
            del self._start

    def wait(self) -> None:
        """Return once the collective is complete.

        Raises:
            BaseException: What one of its halves raised, on whichever thread that was.
        """
        self._stages.start_until(self)
        if self._error is not None:
            raise self._error
        for work in self._works:
            work.wait()


class Stages:
    """The second halves of a group's collectives, in the order in which the collectives were started.

    A rank may wait for its collectives in any order, or for something else in between. So a thread starts what nobody
    has waited for after a short while; it ends when the queue is empty.
    """

    def __init__(self) -> None:
        self._queue: deque[Stage] = deque()
        self._starting = threading.Lock()
        self._changing = threading.Lock()
        self._is_helped = False

    def add(self, start: Callable[[], list[Any]]) -> Stage:
        """Append the second half of a collective whose first half was started.

        Collective: none; the collective was entered when it was started.
        """
        stage = Stage(self, start)
        with self._changing:
            self._queue.append(stage)
            if not self._is_helped:
                self._is_helped = True
                threading.Thread(target=self._help, name="booster-collectives", daemon=True).start()
        return stage

    def start_until(self, stage: Stage) -> None:
        """Start what is queued up to a stage, in order.

        Collective: none; the collectives were entered when they were started.
        """
        while not stage.has_started:
            self._start_first()

    def _start_first(self) -> None:
        with self._starting:
            with self._changing:
                first = self._queue[0] if self._queue else None
            if first is not None:
                first.start()
                with self._changing:
                    self._queue.popleft()

    def _help(self) -> None:
        while True:
            time.sleep(_HELP_SECONDS)
            with self._changing:
                if not self._queue:
                    self._is_helped = False
                    return
            self._start_first()
