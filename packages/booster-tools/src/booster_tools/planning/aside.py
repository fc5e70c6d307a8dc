"""Process groups of a plan's ranks, apart from those of the process: it may have launched, and its ranks may wait."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_core.ranks import PROGRESS, current_world, set_world

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def groups_set_aside() -> Iterator[None]:
    """Let each thread of this process have process groups of its own inside; they are as before afterwards.

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
