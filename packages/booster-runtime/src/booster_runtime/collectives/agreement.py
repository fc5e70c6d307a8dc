"""`BOOSTER_DEBUG=collectives`: ranks compare each collective before it runs, so a mismatch raises instead of hanging.

What each rank of a group is about to call is exchanged through the run's store.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_core.errors import ConfigError, MismatchError, MissingRanksError
from booster_core.ranks import PROGRESS, current_world
from booster_runtime.collectives.groups import timeout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    import torch
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined] # torch does not list Store

_DEBUG, _COLLECTIVES = "BOOSTER_DEBUG", "collectives"
_HOME = str(Path(__file__).parent)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1e-4, 5e-3
_REMEDY = "Every rank must make the same calls in the same order."


def checks_collectives() -> bool:
    """Return whether `BOOSTER_DEBUG` asks to compare collectives between ranks before they run.

    Raises:
        ConfigError: If `BOOSTER_DEBUG` lists anything but ``collectives``.
    """
    words = [word.strip() for word in os.environ.get(_DEBUG, "").split(",") if word.strip()]
    unknown = [word for word in words if word != _COLLECTIVES]
    if unknown:
        msg = f"{_DEBUG}={os.environ[_DEBUG]!r} lists {unknown[0]!r}; the only mode is {_COLLECTIVES!r}."
        raise ConfigError(msg)
    return bool(words)


def agree_on_comparison(group: ProcessGroup, gather: Callable[[Any], list[Any]]) -> Agreement | None:
    """Return what compares the calls of a group's ranks, or ``None`` where no rank asks for it.

    Args:
        group: The group, of several ranks.
        gather: Returns every rank's object, in rank order.

    Raises:
        ConfigError: If `BOOSTER_DEBUG` is wrong, or set on some ranks only. Every rank raises, as all have the answers.

    Collective: every rank of the group.
    """
    try:
        own = checks_collectives(), ""
    except ConfigError as error:
        own = False, str(error)  # travels too, so that every rank raises it
    names = dist.get_process_group_ranks(group)
    answers = gather(own)
    for name, (_, problem) in zip(names, answers, strict=True):
        if problem:
            msg = f"Rank {name}: {problem}"
            raise ConfigError(msg)
    checking = [name for name, (checks, _) in zip(names, answers, strict=True) if checks]
    if 0 < len(checking) < len(names):
        msg = (
            f"BOOSTER_DEBUG=collectives is set on ranks {checking} only, of a group of ranks {names}. Set it on "
            "every rank or on none."
        )
        raise ConfigError(msg)
    return Agreement(group) if checking else None


@dataclass(frozen=True, kw_only=True)
class Call:
    """One rank's call of a collective.

    Args:
        what: The function, dtype, lengths and options; the same on every rank.
        site: File and line of the call, outside of the collectives' own package.
        caller: File and line of the user's code that led there, if that is another place.
        sent: How much this rank sends to each, where that differs from rank to rank.
        received: How much it expects from each.
    """

    what: str
    site: str
    caller: str = ""
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    @classmethod
    def here(
        cls,
        name: str,
        dtype: torch.dtype | None,
        lengths: Sequence[int] | None = None,
        options: str = "",
        *,
        sent: Sequence[int] = (),
        received: Sequence[int] = (),
    ) -> Call:
        """Return the call that is being made on this thread."""
        words = [name]
        if options:
            words.append(f"({options})")
        if lengths is not None:
            words.append(f"of {list(lengths)}")
        if dtype is not None:
            words.append(f"of {dtype}")
        site, caller = _call_sites(sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
        return cls(what=" ".join(words), site=site, caller=caller, sent=list(sent), received=list(received))

    def __str__(self) -> str:
        return f"{self.what} at {self.site}" + (f" (called from {self.caller})" if self.caller else "")

    @property
    def key(self) -> tuple[str, str]:
        """What must be equal on all ranks; hosts may have the file in different folders."""
        return self.what, Path(self.site).name


class Agreement:
    """Compares the calls of a group's ranks, one after the other.

    Args:
        group: The group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        world = current_world()
        assert world.store is not None, "a group of several ranks has a store"
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = world.rank
        self._timeout_seconds = timeout_of(group)
        self._store: Store = world.store
        self._prefix = f"collectives/{group.group_name}/{'-'.join(map(str, self._ranks))}"
        self._count = 0
        self._lock = threading.Lock()

    def check(self, call: Call) -> None:
        """Return once every rank of the group has shown the same call.

        Raises:
            MismatchError: If the calls differ; on every rank, with every call's site.
            MissingRanksError: If a rank shows none within the group's time limit.

        Collective: every rank of the group.
        """
        with self._lock:
            self._count += 1
            self._store.set(self._key(self._count, self._rank), json.dumps(asdict(call)))
            self._store.set(f"collectives/last/{self._rank}", f"{call}, in the group of ranks {self._ranks}")
            calls = self._wait_for_calls(call)
            self._compare(calls)
            # All are at this call, so nobody reads the one before any more.
            if self._count > 1:
                self._store.delete_key(self._key(self._count - 1, self._rank))

    def _key(self, count: int, rank: int) -> str:
        return f"{self._prefix}/{count}/{rank}"

    def _wait_for_calls(self, own: Call) -> dict[int, Call]:
        calls = {self._rank: own}
        deadline, pause = time.monotonic() + self._timeout_seconds, _FIRST_PAUSE_SECONDS
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            PROGRESS.is_waiting = True  # so that the monitor does not take this process for a busy one
        try:
            while True:
                for rank in self._ranks:
                    key = self._key(self._count, rank)
                    # Asked for, not waited for: a blocking `get` would keep other threads from the store.
                    if rank not in calls and self._store.check([key]):
                        calls[rank] = Call(**json.loads(self._store.get(key)))
                if len(calls) == len(self._ranks):
                    return calls
                if time.monotonic() > deadline:
                    self._give_up(own, [rank for rank in self._ranks if rank not in calls])
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            if is_main:
                PROGRESS.is_waiting = False

    def _compare(self, calls: dict[int, Call]) -> None:
        by_call: dict[Any, list[int]] = {}
        for rank in self._ranks:
            by_call.setdefault(calls[rank].key, []).append(rank)
        if len(by_call) > 1:
            parts = [f"{_name(ranks)} {calls[ranks[0]]}" for ranks in by_call.values()]
            msg = (
                f"The ranks call different collectives, as number {self._count} of the group of ranks {self._ranks}: "
                f"{'; '.join(parts)}. {_REMEDY}"
            )
            raise MismatchError(msg)
        for index, sender in enumerate(self._ranks):
            for other, receiver in enumerate(self._ranks):
                if not calls[sender].sent:
                    return
                sent, expected = calls[sender].sent[other], calls[receiver].received[index]
                if sent != expected:
                    msg = (
                        f"Rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}, in the "
                        f"group of ranks {self._ranks}: rank {sender} by {calls[sender]}; rank {receiver} by "
                        f"{calls[receiver]}."
                    )
                    raise MismatchError(msg)

    def _give_up(self, own: Call, missing: list[int]) -> None:
        places = []
        for rank in missing:
            key = f"collectives/last/{rank}"
            last = self._store.get(key).decode() if self._store.check([key]) else "none"
            places.append(f"rank {rank}, whose last collective was {last}")
        msg = (
            f"Waited {self._timeout_seconds:g} s in collective number {self._count} of the group of ranks "
            f"{self._ranks}, {own}, for {'; '.join(places)}. {_REMEDY}"
        )
        raise MissingRanksError(msg)


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"


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
