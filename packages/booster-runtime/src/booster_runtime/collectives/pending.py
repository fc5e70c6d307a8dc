"""`Pending`: a collective that has been started and has to be waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Pending:
    """A collective that has been started. `wait` ends it, and may be called again.

    Args:
        works: What has to end.
        finish: Called once after that, on the waiting thread.

    Buffers that take part must be left alone until `wait` has returned; the object keeps them alive.
    """

    def __init__(self, works: Sequence[Any] = (), finish: Callable[[], None] | None = None, keep: Any = None) -> None:
        self._works = list(works)
        self._finish = finish
        self._keep = keep

    def wait(self) -> None:
        """Return once the result is there.

        Collective: none; the collective itself was entered when it was started.
        """
        works, self._works = self._works, []
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._keep = None
