"""A folder that tensors are offloaded to: whether it can be used, and what errors say of it."""

from __future__ import annotations

import os
from pathlib import Path

from booster_core.errors import ConfigError


class OffloadFolder:
    """A folder of this host, on a disk.

    Args:
        folder: Its path.
        option: The option that named it, for errors.

    Making one touches no file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, option: str = "folder") -> None:
        self.folder = Path(folder)
        self.asked = f"`{option}='{self.folder}'`"

    def check_exists(self) -> None:
        """Check that the folder is there.

        Raises:
            ConfigError: If it is not there, or is no folder.
        """
        if not self.folder.exists():
            msg = f"{self.asked} does not exist on this host. Make the folder, or name another one."
            raise ConfigError(msg)
        if not self.folder.is_dir():
            msg = f"{self.asked} is no folder. Name one on a disk with room for the state."
            raise ConfigError(msg)

    def not_writable(self, cause: OSError) -> ConfigError:
        """Return the error for a folder in which no file can be made."""
        return ConfigError(
            f"{self.asked} can't be written to: {cause.strerror}. Change its permissions, or name another folder."
        )

    def free_bytes(self) -> int:
        """Return what this process may still write into the folder's file system, in bytes."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def told_free_bytes(self) -> str:
        """Return how many bytes are free, as a clause of an error."""
        try:
            return f"{self.free_bytes()} are free"
        except OSError as gone:
            return f"the folder can't be asked: {gone.strerror}"
