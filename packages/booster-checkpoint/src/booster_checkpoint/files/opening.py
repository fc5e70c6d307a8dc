"""Open a file of tensors of either kind, which its content tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_checkpoint.files.safetensors_file import SafetensorsFile
from booster_checkpoint.files.torch_file import TorchFile
from booster_checkpoint.storage.local_file import read_error

if TYPE_CHECKING:
    from pathlib import Path

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.files.tensor_file import TensorFile


def open_tensor_file(path: Path, *, in_memory: bool = False, checks: CheckedReads | None = None) -> TensorFile:
    """Open a file of tensors of either kind; the kind is told by its content, not by its name.

    Args:
        path: The file.
        in_memory: Read all of it at once, in order, instead of the parts that are asked for.
        checks: Verifies what is read; of a safetensors file only.

    Raises:
        CheckpointError: If it cannot be read, is damaged, or is refused for what it holds.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise read_error(error, path) from error
    # A zip (torch.save) or a bare pickle (torch.save before 1.6) begins like this; a safetensors header's length never
    # does, because it would be more than the format allows.
    is_torch = start[:4] == b"PK\x03\x04" or (
        start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    )
    is_torch = is_torch and not _has_plausible_header(path)
    return (
        TorchFile(path, in_memory=in_memory) if is_torch else SafetensorsFile(path, in_memory=in_memory, checks=checks)
    )


def _has_plausible_header(path: Path) -> bool:
    """Whether a JSON object follows 8 bytes, as in a safetensors file whose header length looks like a pickle."""
    with path.open("rb") as file:
        return file.read(9)[8:9] == b"{"
