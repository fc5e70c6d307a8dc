"""The default process group of this process, and what `torch.distributed` does not remember of it.

That is the local rank, the time limit and the plain store. This module opens and closes groups for `launch` and the
tests' worker processes, and describes a group that a user's own ``init_process_group`` made.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from booster_core.errors import BoosterError
from booster_core.ranks.environments import local_rank_of_launcher
from booster_core.ranks.meeting import Meeting, Meetings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined] # torch does not list Store

DEFAULT_TIMEOUT_SECONDS = 600.0
"""How long a collective call waits for missing ranks by default."""


class Monitor(Protocol):
    """What watches the ranks of a launched run, as the hook ``watch_ranks`` returns it."""

    @property
    def is_failing(self) -> bool:
        """Whether a rank has failed, so that all end."""

    @property
    def gone(self) -> dict[int, str]:
        """The ranks that are known to have ended, and how."""

    def describe_missing(
        self, name: str, count: int, ranks: Sequence[int] | None, *, only_ended: bool = False
    ) -> str | None:
        """Say which ranks have not come to a call, and where they are; ``None`` where nobody knows."""

    def hear_uncaught(self) -> Callable[[], None]:
        """Report uncaught exceptions before they are printed; return a function that ends that."""

    def leave(self, error: BaseException | None, seconds: float) -> None:
        """Report how this process ends, and wait for ranks that this one serves."""

    def close(self) -> None:
        """Report that this process ends by its own decision."""


@dataclass(kw_only=True)
class World:
    """One opening of the default process group.

    Args:
        rank: This process's rank.
        world_size: Number of processes.
        local_rank: This process's index on its host.
        timeout_seconds: How long collective calls wait for missing ranks.
        store: The store that all ranks share; ``None`` in a world of one without a process group.
        process_group: The default group that this describes; ``None`` where there is none.
        generation: Counts the groups that this rank has opened over one store; zero where something else opened it.
        monitor: This rank's connection to the monitor, where one runs.
        unwatched_because: Why the monitor, which was to be there, is not.
        at_close: Called, last added first, before the group is destroyed.
        jobs: Numbers work in the background, which all ranks start in step.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    store: Store | None = None
    process_group: ProcessGroup | None = None
    generation: int = 0
    monitor: Monitor | None = None
    unwatched_because: str | None = None
    at_close: list[Callable[[], None]] = field(default_factory=list, repr=False)
    jobs: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    _meetings: Meetings = field(default_factory=Meetings, repr=False)

    @property
    def is_current(self) -> bool:
        """Whether this still describes the default group, or its absence."""
        return _default_group() is self.process_group

    def gone_ranks(self) -> dict[int, str]:
        """Return the ranks that are known, without asking, to have ended, and how."""
        return {} if self.monitor is None else self.monitor.gone

    def meeting_of(self, ranks: tuple[int, ...]) -> Meeting:
        """Return the meetings of ``ranks`` in this thread; the same object each time, because it counts them."""
        meetings = Meetings.of_thread() or self._meetings
        if ranks not in meetings.of_ranks:
            assert self.store is not None, "a world of one has no meetings"
            digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]  # keys stay short with many ranks
            store = _below(self.store, f"{digest}/{meetings.name}")
            meetings.of_ranks.setdefault(ranks, Meeting(store, self.rank, ranks, self.gone_ranks))
        return meetings.of_ranks[ranks]


@dataclass(frozen=True)
class BrokenCall:
    """A call with collectives that an exception ended on this rank, which may owe the other ranks some of them.

    Args:
        name: The call.
        number: Which of its name it is.
        ranks: The ranks that make it; ``None`` for all.
        error: The exception, in words.
        may_repeat: Whether it is Booster's own, which is raised on all ranks, or before anything is sent.
    """

    name: str
    number: int
    ranks: Sequence[int] | None
    error: str
    may_repeat: bool


class Progress:
    """The calls that this process has entered and finished, and the one that has ended in an exception since."""

    __slots__ = ("broken", "call", "counts", "is_finished", "is_waiting", "last", "ranks")

    def __init__(self) -> None:
        self.broken: BrokenCall | None = None
        self.counts: dict[str, int] = {}
        self.call: tuple[str, int] | None = None
        self.ranks: Sequence[int] | None = None
        self.is_waiting = False
        self.last: tuple[str, int] | None = None
        self.is_finished = True

    def enter(self, name: str, ranks: Sequence[int] | None = None) -> int:
        """Note that the call ``name`` begins, and return its number.

        Args:
            name: The call.
            ranks: The ranks that it may wait for; by default, all.
        """
        count = self.counts.get(name, 0) + 1
        self.counts[name] = count
        self.last = (name, count)
        self.is_finished = False
        if self.call is None:
            self.call, self.ranks = self.last, ranks
        return count

    def finish(self, name: str) -> None:
        """Note that the last call ``name`` has ended."""
        self.last = (name, self.counts[name])
        self.is_finished = True
        self.leave(name)

    def leave(self, name: str) -> None:
        """Note that the last call ``name`` is not waited in any more, however it went."""
        if self.call is not None and self.call[0] == name:
            self.call = self.ranks = None

    def break_off(self, name: str, error: Exception) -> None:
        """Note that the last call ``name`` has raised, unless another call is around it, whose code may catch that."""
        if self.call is not None and self.call == (name, self.counts[name]):
            words = f"{type(error).__name__}: {error}"
            self.broken = BrokenCall(*self.call, self.ranks, words, may_repeat=isinstance(error, BoosterError))
        self.leave(name)

    def clear(self) -> None:
        """Forget everything: a new process group begins."""
        self.__init__()  # type: ignore[misc] # the constructor says what nothing is

    def record(self) -> dict[str, Any]:
        """Return the record in a form that travels."""
        return {
            "counts": dict(self.counts),
            "last": self.last,
            "finished": self.is_finished,
            "call": self.call,
            "ranks": None if self.ranks is None else list(self.ranks),
        }


PROGRESS = Progress()
"""The record of this process; each process group starts counting from zero."""


_world = World()


def current_world() -> World:
    """Return a description of the default process group; a world of one where there is none."""
    global _world  # noqa: PLW0603 - mirrors torch's own one default group per process
    if not _world.is_current:
        _world = _describe_foreign_group(_default_group())
    return _world


def opened_world() -> World:
    """Return what `open_world` opened last, whether or not it is still the default group."""
    return _world


def set_world(world: World) -> None:
    """Describe the default group as before, after it was set aside for another one and put back."""
    global _world  # noqa: PLW0603 - as in `open_world`
    _world = world


def open_world(
    store: Store,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    backend: str,
    timeout_seconds: float,
    generation: int | None = None,
    device: torch.device | None = None,
    watch: Callable[[World], None] | None = None,
) -> World:
    """Initialise the default process group and return its description.

    Args:
        store: A store that all ranks share. Keys are prefixed, so one store serves several openings in turn.
        rank: This process's rank.
        world_size: Number of processes.
        local_rank: This process's index on its host.
        backend: As for ``init_process_group``.
        timeout_seconds: Time limit of the group's collectives and of meetings.
        generation: Tells openings over one store apart; by default, how many this rank has had over it, which the
            store counts: processes that serve several runs, such as Ray's actors, may be of different ages.
        device: The CUDA device to which NCCL binds the group.
        watch: Starts the monitor before the group is opened, while ranks can meet only in the store. If the group
            cannot be opened, the monitor goes on until `close_world`, so that others learn of it.

    Collective: every rank of the world.
    """
    import torch.distributed as dist

    global _world  # noqa: PLW0603 - mirrors torch's own one default group per process
    generation = store.add(f"booster/opened/{rank}", 1) if generation is None else generation
    shared = _below(store, f"booster/{generation}")
    world = World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        timeout_seconds=timeout_seconds,
        store=_below(shared, "meet"),
        generation=generation,
    )
    if _world.process_group is None and _world.monitor is not None:
        close_world()  # after an opening that failed
    if backend == "gloo" and world_size > 1:
        run_in_turns()
    if watch is not None:
        watch(world)
    limit = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(
            backend,
            store=_below(shared, "torch"),
            rank=rank,
            world_size=world_size,
            timeout=limit,
            pg_options=group_options(backend, timeout_seconds),
            device_id=device,
        )
    except BaseException:
        if _default_group() is not None:
            dist.destroy_process_group()
        _world = World(monitor=world.monitor, at_close=world.at_close)
        raise
    world.process_group = _default_group()
    _world = world
    let_monitor_speak_first(world.process_group)
    return _world


def nccl_margin_seconds(world_size: int) -> float:
    """Return how much later than the time limit of a run NCCL's watchdog ends a process.

    In that time ranks tell the monitor in which collectives they wait, and it tells all which ranks are missing.
    """
    return 10.0 + min(max(1.0, world_size / 64), 10.0)


def let_monitor_speak_first(group: Any) -> None:
    """Set the time limit of NCCL's collectives in a group a little after that of the run, where a monitor watches it.

    Its watchdog ends the process without a word of who is missing.
    """
    import torch

    if _world.monitor is None or group is None or "nccl" not in torch.distributed.get_backend_config(group):
        return
    backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001 - the only way to one of a group's backends
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    limit = _world.timeout_seconds + nccl_margin_seconds(_world.world_size)
    backend._set_default_timeout(timedelta(seconds=limit))  # noqa: SLF001 - as torch's own `_set_pg_timeout`


def run_in_turns() -> None:
    """Let this thread, and what it starts, keep a processor when another rank wakes up; on Linux alone.

    A rank that has sent a message is often interrupted by the receiver that it woke, and holds a lock of gloo's
    meanwhile, for which gloo's own threads poll. Where ranks and those threads outnumber processors, that is up to a
    third of a step. A policy that the user has set stays.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # ranks are slower without it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def group_options(backend: str, timeout_seconds: float) -> Any:
    """Return torch's options for a new process group, ``None`` for its defaults.

    NCCL's collectives run in streams of high priority: those that were started to run in parallel to computation would
    otherwise begin only when the kernels that are queued leave room.

    Args:
        backend: As for ``init_process_group``, or of a group that exists.
        timeout_seconds: Time limit of its collectives.
    """
    import torch.distributed as dist

    if "nccl" not in backend or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout_seconds)  # noqa: SLF001 - torch warns where it isn't the argument's
    return options


def close_world() -> None:
    """Destroy the default process group, if there is one, after calling its ``at_close``.

    When a rank has failed, nothing is destroyed: the process ends anyway, and destroying may wait for ranks that are
    gone.

    Collective: none; ranks may close one after the other.
    """
    global _world
    if _world.monitor is not None and _world.monitor.is_failing:
        return
    closing, _world, PROGRESS.broken = _world, World(), None
    if closing.is_current:
        for callback in reversed(closing.at_close):
            callback()
    closing.at_close.clear()
    if closing.monitor is not None:
        closing.monitor.close()
    if _default_group() is not None:
        sys.modules["torch.distributed"].destroy_process_group()


def _below(store: Store, prefix: str) -> Store:
    """Return the part of ``store`` whose keys start with ``prefix``."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not list it as public

    return PrefixStore(prefix, store)


def _default_group() -> Any:
    """Return torch's default group, or ``None``; imports nothing."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist.group.WORLD if dist is not None and dist.is_available() and dist.is_initialized() else None


def _describe_foreign_group(group: Any) -> World:
    """Describe a default group that a user initialised, or the absence of one."""
    if group is None:
        return World()
    import torch.distributed as dist

    rank, local_rank = dist.get_rank(), local_rank_of_launcher()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way to the store
    return World(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=rank if local_rank is None else local_rank,  # as on one host
        # No count of groups in the prefix: some ranks may not have looked at every group before this one.
        store=_below(store, "booster/foreign/meet"),
        process_group=group,
    )
