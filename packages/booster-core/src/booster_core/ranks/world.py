"""What this process knows of its default process group: ranks, store, time limit, and which opening of it this is.

`torch.distributed` has one default group per process; this module keeps, beside that group, what torch does not
remember (local rank, time limit, the plain store). It opens and closes groups for `booster_core.launch` and the
tests' worker processes, and describes groups that a user's own ``init_process_group`` made. It reads no environment.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from booster_core.ranks.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined] # torch does not list Store

DEFAULT_TIMEOUT_SECONDS = 600.0
"""How long a collective call waits for missing ranks where nobody said otherwise."""


class Monitor(Protocol):
    """What watches over the ranks of a launched run, as the hook ``watch_ranks`` returns it."""

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
        """Hear of exceptions that nobody catches before they are printed; return what ends that."""

    def leave(self, error: BaseException | None, seconds: float) -> None:
        """Report how this process ends, by an exception or not, and wait for others that this one serves."""

    def close(self) -> None:
        """Say that this process ends by its own decision."""


@dataclass(kw_only=True)
class World:
    """One opening of the default process group.

    Args:
        rank: This process' rank.
        world_size: Number of processes.
        local_rank: This process' index on its host.
        timeout_seconds: How long collective calls wait for missing ranks.
        store: The store that all ranks share; ``None`` in a world of one without a process group.
        process_group: The default group that this describes; ``None`` where there is none.
        generation: Counts the groups this process has had; the same on all ranks that open and close in step.
        monitor: This rank's connection to the monitor, where one runs.
        unwatched_because: Why there is no monitor, where several ranks have none.
        at_close: Called, last added first, before the group is destroyed.
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
    _rendezvous: dict[tuple[int, ...], Rendezvous] = field(default_factory=dict, repr=False)

    @property
    def is_current(self) -> bool:
        """Whether this still describes the process' default group (or its absence)."""
        return _default_group() is self.process_group

    def gone_ranks(self) -> dict[int, str]:
        """Return the ranks that are known to have ended, and how, where that is known without asking.

        Collective: none.
        """
        return {} if self.monitor is None else self.monitor.gone

    def rendezvous_of(self, ranks: tuple[int, ...]) -> Rendezvous:
        """Return the meetings of ``ranks``; the same object each time, because it counts them.

        Collective: none.
        """
        meetings = self._rendezvous.get(ranks)
        if meetings is None:
            assert self.store is not None, "a world of one meets nobody"
            # The store's keys stay short however many ranks there are.
            digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
            meetings = Rendezvous(_below(self.store, digest), self.rank, ranks)
            meetings = self._rendezvous.setdefault(ranks, meetings)
        return meetings


_generations = itertools.count(1)
_world = World()


def current_world() -> World:
    """Return what is known of the process group as it is now; a world of one where none is initialised.

    Collective: none.
    """
    global _world  # noqa: PLW0603 - mirrors torch's own one default group per process
    if not _world.is_current:
        _world = _describe_foreign_group(_default_group())
    return _world


def opened_world() -> World:
    """Return what `open_world` opened last, whether or not it is still the process' default group."""
    return _world


def open_world(
    store: Store,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    backend: str,
    timeout_seconds: float,
    generation: int | None = None,
    watch: Callable[[World], None] | None = None,
) -> World:
    """Initialise the default process group over ``store`` and return its description.

    Args:
        store: A store that all ranks share. Keys are prefixed, so one store serves several openings in turn.
        rank: This process' rank.
        world_size: Number of processes.
        local_rank: This process' index on its host.
        backend: As for ``init_process_group``.
        timeout_seconds: Time limit of the group's collectives and of rendezvous.
        generation: Tells openings over one store apart; by default, how many groups this process has had, which is
            the same on all ranks that open and close in step.
        watch: Called before the group is opened, while ranks can meet in the store only: starts the monitor. Where
            the group then cannot be opened, the monitor goes on until `close_world`, so that others learn of it.

    Collective: every rank of the world.
    """
    import torch.distributed as dist

    global _world  # noqa: PLW0603 - mirrors torch's own one default group per process
    generation = next(_generations) if generation is None else generation
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
        close_world()  # what an opening that failed has left
    if watch is not None:
        watch(world)
    try:
        dist.init_process_group(
            backend,
            store=_below(shared, "torch"),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except BaseException:
        if _default_group() is not None:
            dist.destroy_process_group()
        _world = World(monitor=world.monitor, at_close=world.at_close)
        raise
    world.process_group = _default_group()
    _world = world
    return _world


def close_world() -> None:
    """Destroy the default process group, if there is one, after what was registered to happen before that.

    When a rank has failed, nothing is destroyed: the process ends anyhow, and destroying may wait for ranks that are
    gone.

    Collective: none; ranks may close one after the other.
    """
    global _world
    if _world.monitor is not None and _world.monitor.is_failing:
        return
    closing, _world = _world, World()
    if closing.is_current:
        for callback in reversed(closing.at_close):
            callback()
    closing.at_close.clear()
    if closing.monitor is not None:
        closing.monitor.close()
    if _default_group() is not None:
        import torch.distributed as dist

        dist.destroy_process_group()


def _below(store: Store, prefix: str) -> Store:
    """Return the part of ``store`` whose keys start with ``prefix``."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not list it as public

    return PrefixStore(prefix, store)


def _default_group() -> Any:
    """Return torch's default group, or ``None``, without importing torch.distributed for the question's sake."""
    import sys

    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def _describe_foreign_group(group: Any) -> World:
    """Describe a default group that somebody else initialised, or the absence of one."""
    if group is None:
        return World()
    import torch.distributed as dist

    from booster_core.ranks.launch import local_rank_from_environment

    rank = dist.get_rank()
    local_rank = local_rank_from_environment()
    if local_rank is None:
        local_rank = rank  # one host, as far as anybody has said
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way to the store
    return World(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        # Without a count of its own: a rank need not have looked at every group that came before.
        store=_below(store, "booster/foreign/meet"),
        process_group=group,
    )
