"""What an error of the operating system means for a checkpoint."""

from __future__ import annotations

import errno

from booster_core.errors import BoosterError, CheckpointError


def as_checkpoint_error(error: Exception, path: object) -> Exception:
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
