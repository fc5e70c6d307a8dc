"""Tensors in files of a folder: the kernel moves their pages between disk and RAM as they are used.

Such a tensor is an ordinary CPU tensor to every kernel. Its pages belong to the page cache: they don't count as the
process' own (anonymous) memory, and go to the disk when somebody else needs the room. A file has no name once it is
mapped, so nothing is left behind, even when the process is killed; its room is given back with the last tensor.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from booster_core.errors import OffloadError
from booster_runtime.memory.folder import OffloadFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_MAPS = Path("/proc/self/maps")


class MappedFolder(OffloadFolder):
    """A folder in whose files tensors are; one in memory (tmpfs) saves nothing."""

    def check(self) -> None:
        """Try the folder out.

        Raises:
            ConfigError: If it is not there, is no folder, or can't be written to.
        """
        self.check_exists()
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(b"\0")
        except OSError as cause:
            raise self.not_writable(cause) from cause

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous CPU tensor of zeros in a file of its own, whose room on the disk is taken at once.

        Args:
            shape: Its shape, or its number of elements.
            dtype: Its dtype.

        Raises:
            OffloadError: If there is no room for it, or the file can't be made or mapped.
        """
        sizes = [shape] if isinstance(shape, int) else list(shape)
        numel = math.prod(sizes)
        if numel == 0:
            return torch.zeros(sizes, dtype=dtype)
        num_bytes = numel * dtype.itemsize
        try:
            descriptor, name = tempfile.mkstemp(prefix="booster-", suffix=".mapped", dir=self.folder)
            try:
                # Room is taken now: a page for which there is none when it is written ends the process by a signal.
                _take_room(descriptor, num_bytes)
                tensor = torch.from_file(name, shared=True, size=numel, dtype=dtype)
            finally:
                os.close(descriptor)
                Path(name).unlink()
        except (OSError, RuntimeError) as cause:
            raise OffloadError(self._shortage(num_bytes, cause)) from cause
        return tensor.view(sizes)

    def _shortage(self, num_bytes: int, cause: Exception) -> str:
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        return (
            f"A tensor in a file of {self.asked} needs {num_bytes} bytes, and {self.told_free_bytes()} ({reason}). "
            "Make room, or name another folder."
        )


def mapped_bytes(folder: str | os.PathLike[str]) -> int:
    """Return how many bytes of tensors of this process are in files of a folder (Linux only)."""
    prefix = f"{Path(folder).resolve()}/booster-"
    total = 0
    for line in _MAPS.read_text().splitlines():
        addresses, _, rest = line.partition(" ")
        if prefix in rest:
            start, stop = (int(address, 16) for address in addresses.split("-"))
            total += stop - start
    return total


def _take_room(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:  # macOS: zeros take room as anything does
        block = bytes(1 << 20)
        while num_bytes > 0:
            num_bytes -= os.write(descriptor, block[: min(num_bytes, len(block))])
