"""Telling a path from a URL."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(path: str | Path) -> str | None:
    """Return the scheme of a URL in lower case; ``None`` for a path, and for ``file://``, which is one."""
    match = _SCHEME.match(path) if isinstance(path, str) else None
    scheme = match[1].lower() if match else None
    return None if scheme == "file" else scheme


def local_path(path: str | Path) -> str | Path:
    """Return a path with ``file://`` taken off; URLs of other schemes as they are.

    Raises:
        CheckpointError: If a ``file://`` URL names another host, or another URL has a part ``..``. Most storages take
            that for a name, and the local copy would be written outside of its folder.
    """
    if isinstance(path, str) and path.lower().startswith("file://"):
        parts = urlsplit(path)
        if parts.netloc not in ("", "localhost"):
            msg = f"'{path}' names the host '{parts.netloc}'. Write `file:///path` for a path on this one."
            raise CheckpointError(msg)
        return unquote(parts.path)
    if scheme_of(path) is not None and ".." in str(path).split("/"):
        msg = f"The URL '{path}' has a part '..', which storages do not follow. Write the URL without it."
        raise CheckpointError(msg)
    return path
