"""`FileFrame`: all bytes of a file of tensors except the tensors' values, and where these go.

A format makes a frame from names, shapes and dtypes (`safetensors_frame`, `torch_frame`). Whoever writes, hashes or
uploads a file works on its frame, and knows no format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


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
class FileFrame:
    """A file without its tensors' values.

    Args:
        nbytes: Size of the whole file.
        offsets: Where in the file each tensor's values begin, in bytes.
        pieces: All other bytes of the file: runs, each with its offset, in ascending order.
    """

    nbytes: int
    offsets: Mapping[str, int]
    pieces: tuple[tuple[int, bytes], ...]
