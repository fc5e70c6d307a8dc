"""Process groups with the time limit of the run; torch's own default is many minutes, whatever the launch asked for."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from booster_core.ranks import current_world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


def new_group(ranks: Sequence[int]) -> ProcessGroup:
    """Make a process group whose collectives wait for missing ranks as long as those of the world.

    Args:
        ranks: Its members.

    Collective: every rank of the world, members or not, in the same order among calls.
    """
    group: ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=current_world().timeout_seconds))
    return group
