"""A world of many ranks of which only this process is there, and the counting of a real one."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.ranks import close_world, current_world, open_world
from booster_runtime.collectives.transports import choice
from booster_runtime.collectives.transports.alone import AloneTransport
from booster_runtime.planning.hollow import Watching
from booster_runtime.planning.ledger import Ledger
from booster_runtime.planning.transport import CountingTransport, SilentTransport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import ProcessGroup

    from booster_runtime.collectives.transports import Transport
    from booster_runtime.planning.mail import Mailbox


@contextlib.contextmanager
def watching(mailbox: Mailbox | None = None) -> Iterator[Ledger]:
    """Count what this process holds, sends and computes inside.

    Args:
        mailbox: That of the world that `planned_world` made; ``None`` runs everything, with the ranks that are there.

    Collective: none.
    """
    ledger = Ledger()
    mode = Watching(ledger, mailbox)

    def make(group: ProcessGroup) -> Transport:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1:
            return AloneTransport()
        inner = choice.choose(group) if mailbox is None else SilentTransport(rank, size)
        return CountingTransport(inner, ledger, mode, rank, size)

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        found: torch.UntypedStorage = resize(storage, size)
        if storage.device.type != "meta":
            ledger.note_storage(storage)
        return found

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment] # not dispatched
    try:
        with choice.made_by(make), mode:
            yield ledger
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def check_no_group() -> None:
    """Check that this process has launched no process group.

    Raises:
        ConfigError: If it has.

    Collective: none.
    """
    if current_world().process_group is not None:
        msg = "A plan opens a process group of its own. Call `plan` in a process that has launched none."
        raise ConfigError(msg)


@contextlib.contextmanager
def planned_world(world_size: int, mailbox: Mailbox) -> Iterator[None]:
    """Let this process be one rank of a world whose other ranks do what it does, or have sent it what they do.

    Args:
        world_size: Number of ranks.
        mailbox: That of the rank.

    Raises:
        ConfigError: If there is a process group already.

    Collective: none.
    """
    check_no_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, excepthook = mailbox.rank, sys.excepthook
    open_world(FakeStore(), rank=rank, world_size=world_size, local_rank=rank, backend="fake", timeout_seconds=60.0)
    world = current_world()
    world.rendezvous_of = lambda _: _Attended(rank)  # type: ignore[method-assign,assignment,return-value]

    def broadcast_objects(object_list: list[Any], src: int | None = None, group: Any = None, **kwargs: Any) -> None:
        ranks = dist.get_process_group_ranks(group)
        source = ranks[kwargs["group_src"]] if src is None else src
        object_list[:] = mailbox.broadcast(tuple(ranks), source, object_list)

    gather, broadcast = dist.all_gather_object, dist.broadcast_object_list
    dist.all_gather_object = _gather_object
    dist.broadcast_object_list = broadcast_objects
    try:
        yield
    finally:
        dist.all_gather_object, dist.broadcast_object_list = gather, broadcast
        close_world()
        sys.excepthook = excepthook  # torch puts the rank before tracebacks


class _Attended:
    """Meetings to which every rank has come.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def meet(self, name: str, timeout_seconds: float, problem: Any = None, gone_ranks: Any = dict) -> Sequence[Any]:
        """Return the problem that this rank brings, if any."""
        del name, timeout_seconds, gone_ranks
        return [] if problem is None else [{**problem, "rank": self._rank}]


def _gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    del group
    object_list[:] = [obj] * len(object_list)
