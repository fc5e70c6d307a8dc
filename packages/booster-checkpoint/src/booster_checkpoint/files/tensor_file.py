"""Files of tensors, whatever their format: `TensorFile` reads one; a `FileLayout` is what one is written around.

A format makes a frame from names, shapes and dtypes (`safetensors_frame`, `torch_frame`). Whoever writes, hashes or
uploads a file works on its frame, and knows no format.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_core.state import full_box

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from booster_checkpoint.files.byte_file import ByteFile
    from booster_checkpoint.storage import Location
    from booster_core.state import Box, TensorMeta


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One whole tensor as a file holds it.

    Args:
        key: Name in the file.
        shape: Shape of the whole tensor.
        dtype: Element type in the file.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor's values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A file without its tensors' values.

    Args:
        nbytes: Size of the whole file.
        offsets: Where in the file each tensor's values begin, in bytes.
        pieces: All other bytes of the file: runs, each with its offset, in ascending order.
    """

    nbytes: int
    offsets: Mapping[str, int]
    pieces: tuple[tuple[int, bytes], ...]


class TensorFile(ABC):
    """An open file of tensors. Its directory has been read and checked; no values have."""

    path: Location
    """The file, or the folder of several that are read as one."""
    tensors: Mapping[str, TensorMeta]
    """What the file says of its tensors."""
    values: Mapping[str, Any]
    """What else it holds: encoded JSON by name."""

    @abstractmethod
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor.

        Safe to call from several threads.

        Args:
            key: The tensor.
            box: Index range of the whole tensor; not empty.
            out: Where to put it, row-major: contiguous on the CPU, 1-D, with the file's dtype.
        """

    def place_of(self, key: str) -> tuple[ByteFile, int] | None:
        """Return the file, and where in it a tensor's values begin, if `read` reads them by `ByteFile.read_box`."""
        del key
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""


def read_whole(meta: TensorMeta, read: Callable[[Box, torch.Tensor], None]) -> torch.Tensor:
    """Return all of a tensor.

    Args:
        meta: Its shape and dtype.
        read: Fills a contiguous tensor with the values of a box.
    """
    import torch

    tensor = torch.empty(meta.shape, dtype=meta.dtype)
    if tensor.numel():
        read(full_box(meta.shape), tensor.view(-1))
    return tensor
