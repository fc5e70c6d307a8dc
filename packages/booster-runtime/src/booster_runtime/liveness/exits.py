"""Recognition of an end by ``sys.exit`` with a failure's code, of which the interpreter tells nobody.

Python handles SystemExit before it asks any hook, and forgets it before functions registered with `atexit` run. So
`sys.exit` here raises an exception that notices how it goes: where a script catches it, it is dropped while the
script's frames are there; where nobody does, it is dropped when none is left. ``raise SystemExit(3)`` passes unseen.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

_noticed: list[FailedExit] = []


class FailedExit(SystemExit):
    """What `sys.exit` raises for a failure's code once `notice_failed_exits` is in force.

    Args:
        code: As for `sys.exit`.
        place: File and line of the call.
    """

    def __init__(self, code: object, place: str = "?") -> None:
        super().__init__(code)
        self.place = place
        self._process = os.getpid()

    def __del__(self) -> None:
        """Take note of itself if nobody has caught it."""
        if sys.is_finalizing() or os.getpid() != self._process:  # a fork's end is its own
            return
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():  # noqa: SLF001 - documented, and the only way to the frames
            _noticed.append(self)


def notice_failed_exits() -> Callable[[], None]:
    """Let `sys.exit` leave a trace that `failed_exit` finds.

    Returns:
        What puts the present `sys.exit` back.

    Collective: none.
    """
    previous = sys.exit
    _noticed.clear()

    def noticed_exit(status: object = None, /) -> NoReturn:
        if status is None or isinstance(status, tuple) or (isinstance(status, int) and not status):
            previous(status)  # type: ignore[arg-type] # whatever it makes of a tuple
        caller = sys._getframe(1)  # noqa: SLF001 - documented
        # In no variable of this frame, which the traceback keeps alive, or the exception would never be dropped.
        raise FailedExit(status, f"{caller.f_code.co_filename}:{caller.f_lineno}")

    def uninstall() -> None:
        if sys.exit is noticed_exit:  # else somebody has wrapped it, and may call it yet
            sys.exit = previous

    sys.exit = noticed_exit
    return uninstall


def failed_exit() -> FailedExit | None:
    """Return the `sys.exit` by which the interpreter is ending, if it was a failure's; for exit handlers.

    Collective: none.
    """
    return _noticed[-1] if _noticed else None
