"""Uncaught exceptions: how the monitor hears of them, and which of them only follow from another rank's end."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from booster_core.errors import RankFailedError
from booster_core.ranks import LOST_PEER

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


def report_uncaught(
    report: Callable[[BaseException], bool], wait_until_told: Callable[[], object]
) -> Callable[[], None]:
    """Report exceptions that nobody catches, before the installed excepthook prints them.

    Args:
        report: Called with the exception; returns whether to print its traceback.
        wait_until_told: Called when it has been printed.

    Returns:
        What puts the installed hook back.
    """
    previous, process = sys.excepthook, os.getpid()

    def report_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:  # a fork, whose errors are its own
            previous(kind, error, trace)
            return
        is_shown = True
        with contextlib.suppress(Exception):  # nothing may keep the user's traceback from the screen
            is_shown = report(error)
        if is_shown:
            previous(kind, error, trace)
            wait_until_told()

    def uninstall() -> None:
        if sys.excepthook is report_and_print:  # else somebody has wrapped it, and may call it yet
            sys.excepthook = previous

    sys.excepthook = report_and_print
    return uninstall


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception looks as if another rank's end had caused it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RankFailedError) or LOST_PEER.search(str(seen)):
            return True
        seen = seen.__cause__
    return False
