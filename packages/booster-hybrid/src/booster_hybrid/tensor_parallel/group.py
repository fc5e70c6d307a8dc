"""`TensorGroup`: the ranks over which each layer is split, as the layers see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TensorGroup:
    """The tensor parallel ranks and this rank's place among them.

    Args:
        group: The process group; ``None`` for all ranks.
        rank: This rank's index in it.
        size: Number of ranks.
    """

    group: ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: ProcessGroup | None) -> TensorGroup:
        """Return the place of this rank in a process group.

        Collective: none.
        """
        return cls(group, dist.get_rank(group), dist.get_world_size(group))
