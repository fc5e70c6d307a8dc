"""Planning in a process that has launched: its process group is set aside while the plan has one of its own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch.distributed as dist

from booster_core.ranks import PROGRESS, current_world, set_world

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def group_set_aside() -> Iterator[None]:
    """Let this process have no process group inside; its groups are as before afterwards.

    Other ranks may wait for this one meanwhile, but it must not communicate.

    Collective: none.
    """
    if not dist.is_initialized():
        yield
        return
    from torch._C import _distributed_c10d as registry
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    world, c10d = current_world(), dist.distributed_c10d
    groups, rank = c10d._world, dist.get_rank()  # noqa: SLF001 - where torch keeps all groups, meant to be replaced
    progress = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(PROGRESS).items()}
    names = dict(groups.pg_names)
    for name in names.values():  # a plan's groups have the same names
        registry._unregister_process_group(name)  # noqa: SLF001 - torch has no public way to do so
    c10d._world = ThreadLocalWorld()  # type: ignore[assignment] # noqa: SLF001 - an empty one
    try:
        yield
    finally:
        c10d._world = groups  # noqa: SLF001
        for group, name in names.items():
            registry._register_process_group(name, group)  # noqa: SLF001
        registry._set_global_rank(rank)  # noqa: SLF001
        set_world(world)
        vars(PROGRESS).update(progress)
