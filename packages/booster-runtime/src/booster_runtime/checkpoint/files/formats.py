"""The interface of a file of tensors: laid out before its values exist, and read in parts.

`Container` writes, `TensorFile` reads; ``safetensors_file`` and ``torch_file`` implement both. The bytes of a tensor
are contiguous and row-major in either kind of file, so that values go to their offsets without the container's help.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from booster_core.state import Box, TensorMeta
    from booster_runtime.checkpoint.files.layout import TensorSpec


class Container(ABC):
    """A kind of file that tensors are written into, at offsets known beforehand."""

    suffix: str

    @abstractmethod
    def create(self, path: Path, specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> None:
        """Write a file that is complete except for the tensors' values, for which it has room.

        Args:
            path: The file; replaced if it exists.
            specs: The tensors, in the order of their values.
            values: Other values to be kept: encoded JSON (`booster_runtime.state.jsonable`) by name.
        """

    @abstractmethod
    def offsets(self, path: Path, specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> dict[str, int]:
        """Return where in the file each tensor's values begin, in bytes. The file has been created."""


class TensorFile(ABC):
    """An open file of tensors. Its directory has been read and checked; no values have."""

    path: Path
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

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""
