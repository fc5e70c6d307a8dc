"""Open a file of tensors of either kind, which its content tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_checkpoint.files.safetensors_file import SafetensorsFile
from booster_checkpoint.files.torch_file import TorchFile

if TYPE_CHECKING:
    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.files.tensor_file import TensorFile
    from booster_checkpoint.storage import OpenFile

_START_BYTES = 9


def open_tensor_file(file: OpenFile, *, in_memory: bool = False, checks: CheckedReads | None = None) -> TensorFile:
    """Read the directory of a file of tensors of either kind; the kind is told by its content, not by its name.

    Args:
        file: The open file, which is closed with the result, or if this fails.
        in_memory: Read all of it at once, in order, instead of the parts that are asked for.
        checks: Verifies what is read; of a safetensors file only.

    Raises:
        CheckpointError: If it cannot be read, is damaged, or is refused for what it holds.
    """
    try:
        start = file.stream().read(_START_BYTES)
    except BaseException:
        file.close()
        raise
    # A zip (torch.save) or a bare pickle (torch.save before 1.6) begins like this; a safetensors header's length never
    # does, because it would be more than the format allows. A length that looks like a pickle has a JSON object after
    # it.
    is_pickle = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    if (start[:4] == b"PK\x03\x04" or is_pickle) and start[8:] != b"{":
        return TorchFile(file, in_memory=in_memory)
    return SafetensorsFile(file, in_memory=in_memory, checks=checks)
