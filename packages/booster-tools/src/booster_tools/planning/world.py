"""A world of many ranks of which only this process is there."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster_core.errors import ConfigError
from booster_core.ranks import PROGRESS, Outcome, close_world, current_world, open_world, set_world
from booster_runtime.collectives import Pending, Transport, made_by
from booster_runtime.memory import host_stands_for_device, without_values
from booster_tools.rehearsal import random_state_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import ProcessGroup


@contextlib.contextmanager
def planned_world(world_size: int, rank: int, *, on_host: bool = False) -> Iterator[None]:
    """Let this thread be one rank of a world whose other ranks are not there, and do what it does.

    Args:
        world_size: Number of ranks.
        rank: This one.
        on_host: Whether tensors of the CPU stand for no others, as those of accelerators.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gather, broadcast = dist.all_gather_object, dist.broadcast_object_list
    stands = contextlib.nullcontext() if on_host else host_stands_for_device()
    with random_state_kept(torch.device("cpu")), groups_set_aside(), made_by(_ByTorch), without_values(), stands:
        dist.all_gather_object = _gather_object
        dist.broadcast_object_list = _broadcast_objects  # type: ignore[assignment] # takes the rest by name
        try:
            open_world(
                FakeStore(),
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                backend="fake",
                timeout_seconds=60.0,
                generation=1,  # a fake store can't count
            )
            current_world().meeting_of = lambda _: _Attended()  # type: ignore[method-assign,assignment,return-value]
            try:
                yield
            finally:
                close_world()
        finally:
            dist.all_gather_object, dist.broadcast_object_list = gather, broadcast


class _ByTorch(Transport):
    """Sends by torch's own collectives, as on devices, because these can be answered."""

    def is_by_torch(self, tensor: Tensor) -> bool:
        """Return whether there are other ranks."""
        del tensor
        return self.size > 1

    def reduce_scatter(
        self, source: Tensor | Sequence[tuple[int, Tensor]], bounds: Sequence[int], out: Tensor, **options: Any
    ) -> Pending:
        """Leave out what only the host sends in parts, or sum as torch does."""
        if self.size > 1 and not isinstance(source, Tensor):
            return Pending(keep=source)
        return super().reduce_scatter(source, bounds, out, **options)


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
    source = dist.get_process_group_ranks(group)[kwargs["group_src"]] if src is None else src
    if source != dist.get_rank() and all(each is None for each in object_list):
        msg = (
            f"Rank {dist.get_rank()} needs to be told something by rank {source}, which is not there: each rank is "
            "planned alone. Choose sizes by `booster plan`, which plans rank 0."
        )
        raise ConfigError(msg)


@contextlib.contextmanager
def groups_set_aside() -> Iterator[None]:
    """Let this process have other process groups inside; they are as before afterwards.

    Other ranks may wait for this one meanwhile, but it must not communicate.
    """
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    registry: Any = _distributed_c10d  # of which torch's stubs list a part
    world, c10d, rank = current_world(), dist.distributed_c10d, dist.get_rank() if dist.is_initialized() else -1
    groups, excepthook = c10d._world, sys.excepthook  # noqa: SLF001 - where torch keeps all groups
    progress = {name: copy.copy(getattr(PROGRESS, name)) for name in PROGRESS.__slots__}
    aside: Any = ThreadLocalWorld()
    if not hasattr(aside, "comms"):  # torch 2.11 asks for it, and its own world of threads lacks it
        aside.comms = []
    c10d._world = aside  # noqa: SLF001 - torch's point of extension
    registry._set_thread_isolation_mode(True)  # noqa: SLF001, FBT003 - the names of groups are kept a second time
    try:
        yield
    finally:
        registry._set_thread_isolation_mode(False)  # noqa: SLF001, FBT003
        registry._set_global_rank(rank)  # noqa: SLF001
        c10d._world = groups  # noqa: SLF001
        sys.excepthook = excepthook  # torch puts the rank before tracebacks
        set_world(world)
        for name, value in progress.items():
            setattr(PROGRESS, name, value)
