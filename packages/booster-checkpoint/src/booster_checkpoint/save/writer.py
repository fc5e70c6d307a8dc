"""What else is written to disk, and what an error of the operating system means for a checkpoint."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from booster_core.errors import BoosterError, CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a small file and wait until it is on disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def as_checkpoint_error(error: Exception, path: Path) -> Exception:
    """Return an error of the operating system as one that says what it means for a checkpoint."""
    if isinstance(error, BoosterError) or not isinstance(error, OSError):
        return error
    remedies = {
        errno.ENOSPC: "The disk is full: free some space, or save elsewhere.",
        errno.EDQUOT: "The disk quota is used up: free some space, or save elsewhere.",
        errno.EACCES: "Permission is denied: check the folder's owner and mode.",
        errno.EPERM: "Permission is denied: check the folder's owner and mode.",
        errno.EROFS: "The file system is read-only: save elsewhere.",
        errno.EEXIST: "A part of the path is a file, not a folder: pass another path.",
        errno.ENOTDIR: "A part of the path is a file, not a folder: pass another path.",
    }
    where = error.filename or path
    reason = error.strerror or str(error)
    remedy = remedies.get(error.errno or 0, "")
    failure = CheckpointError(f"'{path}' cannot be written: {reason} ('{where}'). {remedy}".rstrip())
    failure.__cause__ = error
    return failure
