"""`TensorGroup`: the ranks over which each layer is split, as the layers see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from booster_core.errors import ConfigError

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

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse to copy what is part of a model: a copy would not sum what its parts of layers give.

        Raises:
            ConfigError: Always.
        """
        refuse_copy()


def refuse_copy() -> NoReturn:
    """Raise for a copy of a model that hybrid parallelism has split.

    Raises:
        ConfigError: Always.
    """
    msg = (
        "A model that is split over ranks can't be copied: its layers' parameters, gradients and messages belong "
        "together. Copy it before `boost`, and boost the copy as well; for a running mean of the parameters, use "
        "`booster_runtime.ema`."
    )
    raise ConfigError(msg)
