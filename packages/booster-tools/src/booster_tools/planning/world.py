"""A world of many ranks of which only this process is there, and the counting of a real one."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from booster_core.ranks import Outcome, close_world, current_world, observed_by, open_world, set_world
from booster_runtime.collectives import Transport, made_by
from booster_runtime.memory import host_stands_for_device
from booster_tools.planning.aside import groups_set_aside
from booster_tools.planning.hollow import Watching
from booster_tools.planning.ledger import Ledger
from booster_tools.planning.transport import SilentTransport
from booster_tools.verification.run import random_state_kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from booster_core.ranks import ObservedCall
    from booster_tools.planning.mail import Mailbox


class _Run(NamedTuple):
    """What a thread counts."""

    ledger: Ledger
    mode: Watching
    mailbox: Mailbox | None


_run: ContextVar[_Run] = ContextVar("booster planned rank")
"""Of the thread that runs."""


class _Counting:
    """Counts each collective as a whole, whatever messages a transport makes of it."""

    def during(self, call: ObservedCall) -> AbstractContextManager[object]:
        """Return a context in which the messages of a collective are not counted one by one."""
        run = _run.get(None)
        if run is None or call.group is None or dist.get_world_size(call.group) == 1:
            return contextlib.nullcontext()
        if call.payload_bytes:  # the wait for it has none, and objects are not counted, as their sizes differ
            run.ledger.communicate(call.name, call.payload_bytes, call.sent_bytes)
        return run.mode.quiet()


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Let communication and resized storages be counted in every thread that is `watching`."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        found: torch.UntypedStorage = resize(storage, size)
        run = _run.get(None)
        if run is not None and storage.device.type != "meta":
            run.ledger.note_storage(storage)
        return found

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment] # not dispatched
    try:
        with observed_by(_Counting()):
            yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextlib.contextmanager
def watching(mailbox: Mailbox | None = None, *, computes: bool) -> Iterator[Ledger]:
    """Count what this thread holds, sends and computes inside.

    Args:
        mailbox: That of the world that `planned_world` made; ``None`` communicates with the ranks that are there.
        computes: Whether operations are run, or only those on small tensors.
    """
    ledger = Ledger()
    mode = Watching(ledger, mailbox, computes=computes)
    token = _run.set(_Run(ledger, mode, mailbox))
    try:
        with mode:
            yield ledger
    finally:
        _run.reset(token)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Let threads of this process be ranks of planned worlds, which `planned_world` opens."""
    gather, broadcast = dist.all_gather_object, dist.broadcast_object_list
    with random_state_kept(torch.device("cpu")), groups_set_aside(), made_by(_make_silent), counted():
        dist.all_gather_object = _gather_object
        dist.broadcast_object_list = _broadcast_objects  # type: ignore[assignment] # takes the rest by name
        try:
            yield
        finally:
            dist.all_gather_object, dist.broadcast_object_list = gather, broadcast


@contextlib.contextmanager
def planned_world(
    world_size: int, mailbox: Mailbox, *, on_host: bool = False, device_type: str = "cpu"
) -> Iterator[None]:
    """Let this thread be one rank of a world whose other ranks do what it does, or have sent it what they do.

    Args:
        world_size: Number of ranks.
        mailbox: That of the rank.
        on_host: Whether ranks compute on the CPU, so that its tensors stand for no others.
        device_type: What they compute on really, where that is not the CPU.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = mailbox.rank
    open_world(FakeStore(), rank=rank, world_size=world_size, local_rank=rank, backend="fake", timeout_seconds=60.0)
    world = current_world()
    world.meeting_of = lambda _: _Attended()  # type: ignore[method-assign,assignment,return-value]
    try:
        with contextlib.nullcontext() if on_host or device_type != "cpu" else host_stands_for_device():
            yield
    finally:
        set_world(world)  # another rank's may be the current one, where this one is abandoned
        close_world()


def _make_silent(group: ProcessGroup) -> Transport:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return Transport(group) if size == 1 else SilentTransport(rank, size)


class _Attended:
    """Meetings to which every rank has come, as well as this one."""

    def meet(self, name: str, **brought: Any) -> Outcome:
        """Return that all is well; what this rank brings itself, it raises."""
        del name, brought
        return Outcome([], differs=False)


def _gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    del group
    object_list[:] = [obj] * len(object_list)


def _broadcast_objects(object_list: list[Any], src: int | None = None, group: Any = None, **kwargs: Any) -> None:
    mailbox = _run.get().mailbox
    assert mailbox is not None, "ranks that are there use torch's own"
    ranks = dist.get_process_group_ranks(group)
    source = ranks[kwargs["group_src"]] if src is None else src
    object_list[:] = mailbox.broadcast(tuple(ranks), source, object_list)
