"""The calls with collectives that this process makes: counted, shown to observers, and explained when they time out.

A `NamedCall` notes in `PROGRESS` how far this process has come through the calls that all ranks make: a few attribute
writes and no communication. Only when a collective inside of it has timed out is the monitor asked where the others
are. If an exception ends it, the monitor hears of that, too, and ends those that wait for this rank in it. An observer,
such as a profiler, sees every call that begins while it is there. Without one, it costs one test.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from booster_core.errors import BoosterError, ConfigError, MissingRanksError, name_ranks
from booster_core.ranks.world import PROGRESS, current_world

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from booster_core.ranks.world import BrokenCall

_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited|remote end closed|"
    r"store that they share has gone away|failed to recv, got 0 bytes|nccl.*remote|its memory can't be read any more",
    re.IGNORECASE,
)
"""What is raised where another rank's process has gone."""


class Observer(Protocol):
    """Sees the calls of this process; see `observed_by`."""

    def during(self, call: ObservedCall) -> AbstractContextManager[object]:
        """Return a context that is entered for the time of a call."""


OBSERVERS: list[Observer] = []
"""Those that see calls now. Test it before you do anything for them."""


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Show an observer the calls of this process that begin in a ``with`` block.

    Calls of all threads are shown, because backward may run on threads of autograd. Who cares looks at the thread.

    Args:
        observer: Its ``during(call)`` returns a context, which is entered for the time of the call.
    """
    OBSERVERS.append(observer)
    try:
        yield
    finally:
        OBSERVERS.remove(observer)


def refuse_capture(name: str) -> None:
    """Refuse a call while the current stream records a CUDA graph, which would repeat kernels and no Python.

    Args:
        name: The call as the user knows it.

    Raises:
        ConfigError: If it does.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and torch.cuda.is_current_stream_capturing():
        msg = (
            f"`{name}` was called while a CUDA graph is captured. A replay would repeat the kernels of this step, and "
            "not what the plugin does from step to step: reductions, schedules and checks would be those of this one. "
            "Run boosted models and optimizers outside of `torch.cuda.graph` and `make_graphed_callables`."
        )
        raise ConfigError(msg)


class ObservedCall:
    """Context around a call that observers see and nobody counts, such as a single collective.

    Args:
        name: The call as the user knows it.
        ranks: The ranks that take part; by default, all.
        group: The process group that the call communicates in, where it is one collective.
        payload_bytes: Size of the tensors that it combines, copies or gathers, on this rank.
        sent_bytes: How much of that this rank sends to others.

    Raises:
        ConfigError: While a CUDA graph is captured; see `refuse_capture`.
    """

    __slots__ = ("_contexts", "group", "name", "payload_bytes", "ranks", "sent_bytes")

    def __init__(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        *,
        group: ProcessGroup | None = None,
        payload_bytes: int = 0,
        sent_bytes: int = 0,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.group = group
        self.payload_bytes = payload_bytes
        self.sent_bytes = sent_bytes
        self._contexts: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        refuse_capture(self.name)
        if OBSERVERS:
            self._show()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        contexts, self._contexts = self._contexts, None
        if contexts is not None:
            contexts.__exit__(kind, error, trace)

    def _show(self) -> None:
        with contextlib.ExitStack() as contexts:
            for observer in tuple(OBSERVERS):
                contexts.enter_context(observer.during(self))
            self._contexts = contexts.pop_all()


class NamedCall(ObservedCall):
    """Context around a call with collectives: if they time out, raise an error that names the ranks that did not come.

    The calls of each name are counted, so every rank that takes part makes it equally often, in the same order. Where
    an exception ends one, ranks meet before the next, because collectives that one rank has left out would be paired
    with later ones of the others.

    Args:
        name: The call as the user knows it.
        ranks: The ranks that take part; by default, all.
        is_alone: Whether a rank may leave the call by an exception, as no other waits for it there.
        **described: As for `ObservedCall`.

    Raises:
        ConfigError: While a CUDA graph is captured; see `refuse_capture`.
        MissingRanksError: In place of torch's timeout, and after a call that has raised here alone.
    """

    __slots__ = ("_count", "_is_alone", "_start")

    def __init__(
        self, name: str, ranks: Sequence[int] | None = None, *, is_alone: bool = False, **described: Any
    ) -> None:
        super().__init__(name, ranks, **described)
        self._is_alone = is_alone

    def __enter__(self) -> None:
        refuse_capture(self.name)
        if PROGRESS.broken is not None and threading.current_thread() is threading.main_thread():
            _meet_after(PROGRESS.broken)
        if OBSERVERS:
            self._show()
        self._count = PROGRESS.enter(self.name, self.ranks)
        self._start = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                PROGRESS.finish(self.name)
                return
            is_alone = self._is_alone or threading.current_thread() is not threading.main_thread()
            if isinstance(error, Exception) and not isinstance(error, StopIteration) and not is_alone:
                PROGRESS.break_off(self.name, error)
            else:
                PROGRESS.leave(self.name)
            if isinstance(error, RuntimeError) and not isinstance(error, BoosterError):
                self._explain(error)
        finally:
            super().__exit__(kind, error, trace)

    def _explain(self, error: RuntimeError) -> None:
        """Raise an error that names ranks in place of one that is about other ranks."""
        world = current_world()
        missing = None
        if _TIMEOUT.search(str(error)):
            if world.monitor is not None:
                missing = world.monitor.describe_missing(self.name, self._count, self.ranks)
            if missing is None:
                missing = (
                    f"some ranks of {world.world_size} did not reach it, or are too slow; which ones is not known, "
                    "because no monitor watches this run (see `booster_core.launch`), or rank 0 has ended."
                )
            seconds = time.monotonic() - self._start
            msg = f"`{self.name}` #{self._count} timed out after {seconds:.3g} s: {missing}"
            raise MissingRanksError(msg) from error
        if LOST_PEER.search(str(error)) and world.monitor is not None:
            missing = world.monitor.describe_missing(self.name, self._count, self.ranks, only_ended=True)
            if missing is not None:
                raise MissingRanksError(missing) from error


def _meet_after(broken: BrokenCall) -> None:
    """Meet the ranks of a call that has raised here: they go on together only if it has raised on all of them.

    Raises:
        MissingRanksError: If they do not come.

    Collective: the ranks of that call.
    """
    world = current_world()
    ranks = tuple(broken.ranks or range(world.world_size))
    if not broken.may_repeat and world.store is not None and len(ranks) > 1:
        name = f"next call after `{broken.name}` has raised"
        PROGRESS.enter(name, ranks)
        PROGRESS.is_waiting = True
        try:
            world.meeting_of(ranks).meet(name, timeout_seconds=world.timeout_seconds)
        except MissingRanksError as missing:
            msg = (
                f"`{broken.name}` #{broken.number} has raised on this rank, but not on all of {name_ranks(ranks)}, "
                f"which wait for what it left out: {broken.error}. Let the exception end the run, or catch it where it "
                "is raised on every rank."
            )
            raise MissingRanksError(msg) from missing
        finally:
            PROGRESS.is_waiting = False
            PROGRESS.leave(name)
        PROGRESS.finish(name)
    PROGRESS.broken = None
