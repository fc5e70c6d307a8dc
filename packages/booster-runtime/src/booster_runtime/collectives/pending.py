"""`Pending`: a collective that was started and must be waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_runtime.collectives.waits import WAITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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

    def wait(self) -> None:
        """Return once the result is there.

        Collective: none; the collective was entered when it was started.
        """
        works, self._works = self._works, []
        if works:
            with WAITS:
                for work in works:
                    work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._keep = None
