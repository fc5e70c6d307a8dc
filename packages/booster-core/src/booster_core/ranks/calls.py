"""The calls with collectives that this process makes: counted, shown to observers, and explained when they time out.

A `NamedCall` notes in `PROGRESS` how far this process has come through the calls that all ranks make: a few attribute
writes and no communication. Only when a collective inside of it has timed out is the monitor asked where the others
are. An observer, such as a profiler, sees every call that begins while it is there. Without one, it costs one test.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Protocol

import torch

from booster_core.errors import BoosterError, ConfigError, MissingRanksError
from booster_core.ranks.world import PROGRESS, current_world

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch.distributed import ProcessGroup

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

    The calls of each name are counted, so every rank that takes part makes it equally often, in the same order.

    Raises:
        ConfigError: While a CUDA graph is captured; see `refuse_capture`.
        MissingRanksError: In place of torch's timeout.
    """

    __slots__ = ("_count", "_start")

    def __enter__(self) -> None:
        refuse_capture(self.name)
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
