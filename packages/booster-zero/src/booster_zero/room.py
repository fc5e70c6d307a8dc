"""Where the optimizer's tensors lie on the host: in RAM, or in files of a folder.

A folder that has no room left must lose nothing: what finds none stays in RAM, the step is finished, and then every
rank raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import OffloadError
from booster_core.ranks import DistCoordinator
from booster_runtime import collectives
from booster_zero.engine.lane import in_ram

if TYPE_CHECKING:
    from torch import Tensor

    from booster_runtime.memory import MappedFolder


class Room:
    """Hands out memory for masters and optimizer state.

    Args:
        folder: Where tensors of the host are to lie; ``None`` for RAM.
    """

    def __init__(self, folder: MappedFolder | None = None) -> None:
        self._folder = folder
        self._shortage: OffloadError | None = None

    @property
    def is_on_disk(self) -> bool:
        """Whether tensors of the host lie in files."""
        return self._folder is not None

    def zeros(self, numel: int, dtype: torch.dtype, home: torch.device, beside: torch.device) -> Tensor:
        """Return zeros to be kept; in RAM where the folder has no room, which `check_together` raises for.

        Args:
            numel: Number of elements.
            dtype: Their format.
            home: The device on which they are to be.
            beside: The device that they are copied from and to.
        """
        filed = self.filed(numel, dtype) if home.type == "cpu" else None
        return in_ram(numel, dtype, home, beside) if filed is None else filed

    def filed(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return zeros in a file; ``None`` where there is no folder, or no room in it."""
        if self._folder is None:
            return None
        try:
            return self._folder.zeros(numel, dtype)
        except OffloadError as error:
            self._shortage = self._shortage or error
            return None

    def check_together(self, what_happened: str) -> None:
        """Raise on every rank if any rank found no room since the last call.

        Args:
            what_happened: What has been done all the same, for the message.

        Raises:
            OffloadError: Naming folder, bytes needed and bytes free.

        Collective: every rank of the world where there is a folder, else none.
        """
        if self._folder is None:
            return
        flag = torch.tensor([self._shortage is not None], dtype=torch.uint8)
        collectives.all_reduce(flag, dist.ReduceOp.MAX).wait()
        if not flag.item():
            return
        shortage, self._shortage = self._shortage, None
        error = None if shortage is None else OffloadError(f"{shortage} {what_happened}")
        DistCoordinator().raise_together(error, name="offload to disk")
