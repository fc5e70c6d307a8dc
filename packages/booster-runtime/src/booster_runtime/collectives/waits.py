"""A note of the waits for other ranks that torch's flight recorder does not list: those for sends and receives."""

from __future__ import annotations

import threading


class Waits:
    """The waits of the main thread, for the monitor, which reads them from a thread of its own.

    Attributes:
        number: How many there have been.
        is_in_one: Whether the main thread waits now.
    """

    __slots__ = ("is_in_one", "number")

    def __init__(self) -> None:
        self.number = 0
        self.is_in_one = False

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self.number += 1
            self.is_in_one = True

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self.is_in_one = False


WAITS = Waits()
"""Those of this process: ``with WAITS: work.wait()``."""
