"""Process groups with the time limit of the run; torch's own default is many minutes, whatever the launch asked for."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

from booster_core.ranks import current_world, group_options, let_monitor_speak_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


def new_groups(groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """Make process groups that have no ranks in common, such as all those along one axis of a mesh.

    Their collectives wait for missing ranks as long as those of the world. Each rank calls ``new_group`` once, for its
    own group. torch asks for a call for every group on every rank: thousands of calls on each of 1,024 ranks. Yet a
    rank outside of a group only counts the call, because the count names groups; here that is done at once. Where NCCL
    is bound to a device, the one call is the rank's part in the ``ncclCommSplit`` that makes all the groups.

    Args:
        groups: The members of each group, the same on every rank.

    Returns:
        This rank's group; ``None`` where it is in none of them.

    Collective: every rank of the world, in the same order among calls.
    """
    rank, seconds, backend = dist.get_rank(), current_world().timeout_seconds, dist.get_backend_config()
    world = distributed_c10d._world  # noqa: SLF001 - where torch counts groups
    found = None
    for together in _made_together(groups):
        own = next((index for index, ranks in enumerate(together) if rank in ranks), None)
        count = world.group_count
        world.group_count = count + (own or 0)
        made: ProcessGroup = dist.new_group(
            together[own or 0], timeout=timedelta(seconds=seconds), pg_options=group_options(backend, seconds)
        )
        world.group_count = count + len(together)
        if own is not None:
            let_monitor_speak_first(made)
            found = made
    return found


def _made_together(groups: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Return the groups, divided into those that are made at the same time: all of them, but for rare cases."""
    if distributed_c10d._is_barrier_after_init():  # noqa: SLF001 - then all ranks wait for each other in every call
        return [[ranks] for ranks in groups]
    # ``ncclCommSplit`` tells groups by a hash of their ranks: two with the same one would become one group.
    rounds: list[dict[int, Sequence[int]]] = []
    for ranks in groups:
        color = distributed_c10d._process_group_color(list(ranks))  # noqa: SLF001
        free = next((each for each in rounds if color not in each), None)
        if free is None:
            rounds.append(free := {})
        free[color] = ranks
    return [list(each.values()) for each in rounds]
