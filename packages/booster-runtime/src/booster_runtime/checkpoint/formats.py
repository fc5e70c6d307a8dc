"""What a file of tensors is to the rest: something that can be laid out before its values exist, and read in parts.

`Container` writes, `TensorFile` reads; ``safetensors_file`` and ``torch_file`` implement both. The bytes of a tensor
are contiguous and row-major in either kind of file, so that values go to their offsets without the container's help.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from booster_core.state import Box, TensorMeta
    from booster_runtime.checkpoint.plan import TensorSpec


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


def container_for(suffix: str) -> Container:
    """Return the kind of file that a suffix names: ``".safetensors"`` or ``".bin"``."""
    from booster_runtime.checkpoint.naming import SAFETENSORS
    from booster_runtime.checkpoint.safetensors_file import SafetensorsContainer
    from booster_runtime.checkpoint.torch_file import TorchContainer

    return SafetensorsContainer() if suffix == SAFETENSORS else TorchContainer()


def open_tensor_file(path: Path, *, in_memory: bool = False) -> TensorFile:
    """Open a file of tensors of either kind; the kind is told by its content, not by its name.

    Args:
        path: The file.
        in_memory: Read all of it at once, in order, instead of the parts that are asked for.

    Raises:
        CheckpointError: If it cannot be read, is damaged, or is refused for what it holds.
    """
    from booster_runtime.checkpoint.safetensors_file import SafetensorsFile
    from booster_runtime.checkpoint.torch_file import TorchFile

    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        msg = f"'{path}' cannot be read: {error.strerror or error}."
        raise CheckpointError(msg) from error
    # A zip (torch.save) or a bare pickle (torch.save before 1.6) begins like this; a safetensors header's length never
    # does, because it would be more than the format allows.
    is_torch = start[:4] == b"PK\x03\x04" or (
        start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    )
    is_torch = is_torch and not _has_plausible_header(path)
    return TorchFile(path, in_memory=in_memory) if is_torch else SafetensorsFile(path, in_memory=in_memory)


def _has_plausible_header(path: Path) -> bool:
    """Whether a JSON object follows 8 bytes, as in a safetensors file whose header length looks like a pickle."""
    with path.open("rb") as file:
        return file.read(9)[8:9] == b"{"
