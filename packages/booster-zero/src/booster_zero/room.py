"""Where the optimizer's tensors lie on the host: in RAM, or in files of a folder; and copies beside computation.

A folder that has no room left must lose nothing: what finds none stays in RAM, the step is finished, and then every
rank raises.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core import collectives
from booster_core.coordinator import DistCoordinator
from booster_core.errors import OffloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from booster_core.memory.mapped import MappedFolder


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


def in_ram(numel: int, dtype: torch.dtype, home: torch.device, beside: torch.device) -> Tensor:
    """Return zeros in memory, such that copies to and from a device need not wait where that can be."""
    pins = home.type == "cpu" and beside.type == "cuda"
    return torch.zeros(numel, dtype=dtype, device=home, pin_memory=pins)


class Lane:
    """A stream of copies and collectives beside the one that computes; nothing on the CPU, which has none.

    Args:
        device: The device whose memory is copied from and to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let what the body starts follow what has been started so far, and run beside what is started later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def mark(self) -> torch.Event | None:
        """Return an event that has come when everything started in the lane so far has ended."""
        return None if self._stream is None else self._stream.record_event()
