"""``*.index.json``: which file of a divided checkpoint holds which tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import CheckpointAbsentError, CheckpointDamagedError
from booster_core.state import parse_json

if TYPE_CHECKING:
    from booster_checkpoint.storage import Location

_LONGEST_NAME = 255
"""What file systems take; a longer name would be an error of the operating system."""


def read_index(path: Location) -> dict[str, str]:
    """Return tensor name to file name.

    Raises:
        CheckpointAbsentError: If there is no such file.
        CheckpointDamagedError: If the file is not an index, or leads out of its folder.
    """
    written = path.read_bytes()
    if written is None:
        msg = f"There is no index '{path}'."
        raise CheckpointAbsentError(msg)
    content = parse_json(written, str(path))
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        msg = f"'{path}' is not a checkpoint index: it has no `weight_map` from tensor names to file names."
        raise CheckpointDamagedError(msg)
    for name in files.values():
        if not name or name in (".", "..") or "/" in name or "\\" in name or len(name) > _LONGEST_NAME:
            msg = (
                f"The index '{path}' names the file '{name[:_LONGEST_NAME]}', which is not in its folder. It is "
                "damaged or hostile."
            )
            raise CheckpointDamagedError(msg)
    return files
