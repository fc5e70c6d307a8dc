"""`BOOSTER_DEBUG=collectives`: which collectives this process calls, and where, for the monitor, which compares them.

Nobody waits for that: a call is noted, told to the monitor, and runs.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    import torch
    from torch.distributed import ProcessGroup

_DEBUG, _COLLECTIVES = "BOOSTER_DEBUG", "collectives"
_HOME = str(Path(__file__).parent)
_MAX_CHARS = 2000


def notes_collectives() -> bool:
    """Return whether `BOOSTER_DEBUG` asks to tell the monitor of collectives.

    Raises:
        ConfigError: If `BOOSTER_DEBUG` lists anything but ``collectives``.
    """
    words = [word.strip() for word in os.environ.get(_DEBUG, "").split(",") if word.strip()]
    unknown = [word for word in words if word != _COLLECTIVES]
    if unknown:
        msg = f"{_DEBUG}={os.environ[_DEBUG]!r} lists {unknown[0]!r}; the only mode is {_COLLECTIVES!r}."
        raise ConfigError(msg)
    return bool(words)


@dataclass(frozen=True, kw_only=True)
class NotedCall:
    """One rank's call of a collective.

    Args:
        group: Name of the process group.
        ranks: The world ranks of the group.
        number: Which of the group's collectives it is.
        what: The function, dtype, lengths and options; the same on every rank.
        site: File and line of the call, outside of the collectives' own package.
        caller: File and line of the user's code that led there, if that is another place.
        sent: How much this rank sends to each, where that differs from rank to rank.
        received: How much it expects from each.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    what: str
    site: str
    caller: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} at {self.site}" + (f" (called from {self.caller})" if self.caller else "")

    @property
    def kind(self) -> tuple[str, str]:
        """What must be equal on all ranks; hosts may have the file in different folders."""
        return self.what, Path(self.site).name


class CallNotes:
    """Notes of this process's collectives.

    Attributes:
        monitor: Can be told of calls; ``None`` where no monitor watches this run.
        listener: Told of each call before it runs; ``None`` while nobody asks for it.
        last: The last call.
    """

    def __init__(self) -> None:
        self.monitor: Callable[[NotedCall], None] | None = None
        self.listener: Callable[[NotedCall], None] | None = None
        self.last: NotedCall | None = None
        self._counts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._lock = threading.Lock()

    def watched_by(self, monitor: Callable[[NotedCall], None] | None) -> None:
        """Forget everything: another monitor begins, or none watches any more."""
        self.__init__()  # type: ignore[misc] # the constructor says what nothing is
        self.monitor = monitor

    def begin(self) -> None:
        """Tell the monitor of every call from now on; let Python say where it is when gloo aborts the process.

        Raises:
            ConfigError: If there is no monitor.
        """
        if self.monitor is None:
            msg = (
                "BOOSTER_DEBUG=collectives tells the monitor of collectives, and no monitor watches this run. Start it "
                "by `booster_core.launch`, without BOOSTER_MONITOR=0."
            )
            raise ConfigError(msg)
        self.listener = self.monitor
        if not faulthandler.is_enabled():
            faulthandler.enable()

    def note(
        self,
        group: ProcessGroup,
        name: str,
        dtype: torch.dtype | None,
        lengths: Sequence[int] | None = None,
        options: str = "",
        *,
        sent: Sequence[int] = (),
        received: Sequence[int] = (),
    ) -> None:
        """Tell of the call that is being made on this thread, if anybody asks for it."""
        listener = self.listener
        if listener is None:
            return
        key = group.group_name, tuple(dist.get_process_group_ranks(group))
        if len(key[1]) == 1:
            return
        words = [name]
        if options:
            words.append(f"({options})")
        if lengths is not None:
            words.append(f"of {list(lengths)}")
        if dtype is not None:
            words.append(f"of {dtype}")
        site, caller = _call_sites(sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
        with self._lock:  # told in the order in which they are counted
            number = self._counts[key] = self._counts.get(key, 0) + 1
            self.last = NotedCall(
                group=key[0],
                ranks=key[1],
                number=number,
                what=_shortened(" ".join(words)),
                site=site,
                caller=caller,
                sent=tuple(sent),
                received=tuple(received),
            )
            listener(self.last)


NOTES = CallNotes()
"""Those of this process."""


def _shortened(what: str) -> str:
    """Return a description, or the beginning of a long one with a checksum of it: a buffer may have many parts."""
    return what if len(what) <= _MAX_CHARS else f"{what[:_MAX_CHARS]} ... ({zlib.crc32(what.encode()):08x})"


def _call_sites(frame: FrameType | None) -> tuple[str, str]:
    """Return the call's place outside of this package, and the user's place, if that is another one."""
    while frame is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    site = _place(frame)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    caller = "" if frame is None else _place(frame)
    return site, "" if caller == site else caller


def _is_library(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return name.startswith("booster_") or name in ("torch", "contextlib", "functools", "threading")


def _place(frame: FrameType | None) -> str:
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
