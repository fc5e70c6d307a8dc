"""Storages for checkpoints at URLs: a small protocol, the storage of a scheme, and fsspec behind most.

A storage moves whole files between a local path and a URL, and nothing else: what is written is complete on the local
disk before it travels, and what is read is a local copy. A third party brings a storage for its own scheme by the
hook ``storage(scheme)``; every other scheme goes to fsspec. ``file://`` is the local disk itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@runtime_checkable
class Storage(Protocol):
    """Files at URLs of one scheme. Errors are ``OSError``, or `CheckpointError` where there is more to say."""

    def list(self, url: str) -> Mapping[str, int]:
        """Return the sizes of files at and below a URL, by their path below it (``""`` for a file at the URL)."""

    def upload(self, path: Path, url: str) -> None:
        """Put a local file at a URL, replacing what is there. A reader sees the old or the new file, not a part."""

    def download(self, url: str, path: Path) -> None:
        """Put the file at a URL into a local file."""

    def remove(self, url: str) -> None:
        """Remove the file at a URL, or all files below it."""


def leaves_folder(key: str) -> bool:
    """Return whether a key, or a name with ``/`` between its parts, leads out of the folder it is joined to."""
    return key.startswith(("/", "\\")) or ".." in key.replace("\\", "/").split("/") or "\0" in key


def storage_for(scheme: str) -> Storage:
    """Return the storage of a scheme: a hook's, else fsspec's.

    Raises:
        CheckpointError: If a hook returned something else, fsspec or its driver is not installed, or nobody knows
            the scheme.

    Collective: none.
    """
    from booster_core.plugin import hook_relay

    found = hook_relay().storage(scheme=scheme)
    if found is None:
        return FsspecStorage(scheme)
    if not isinstance(found, Storage):
        msg = (
            f"The hook `storage` returned a `{type(found).__name__}` for '{scheme}://', which lacks some of the "
            "methods list, upload, download, remove."
        )
        raise CheckpointError(msg)
    return found


class FsspecStorage:
    """Files of any scheme that fsspec has a driver for.

    Args:
        scheme: Such as ``"s3"``, ``"gs"`` or ``"memory"``.

    Raises:
        CheckpointError: If fsspec or the driver is not installed, or fsspec does not know the scheme.
    """

    def __init__(self, scheme: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            msg = (
                f"Checkpoints at '{scheme}://' need fsspec, which is not installed. Run `pip install fsspec`, or "
                "`pip install 'booster-runtime[storage]'`."
            )
            raise CheckpointError(msg) from error
        try:
            self._files: Any = fsspec.filesystem(scheme)
        except ImportError as error:
            msg = f"Checkpoints at '{scheme}://' need a driver that is not installed: {error}."
            raise CheckpointError(msg) from error
        except ValueError as error:
            msg = (
                f"No storage is known for '{scheme}://': neither a hook `storage` nor fsspec has one ({error}). Use a "
                "path, or a scheme such as s3, gs, hf, memory."
            )
            raise CheckpointError(msg) from error

    def list(self, url: str) -> Mapping[str, int]:
        self._files.invalidate_cache()
        base = self._files._strip_protocol(url)  # noqa: SLF001 - how fsspec's own code gets from a URL to a path
        found = self._files.find(url, detail=True)
        return {path[len(base) :].lstrip("/"): int(entry["size"]) for path, entry in found.items()}

    def upload(self, path: Path, url: str) -> None:
        parent = url.rpartition("/")[0]
        if not parent.endswith("/"):
            self._files.makedirs(parent, exist_ok=True)
        self._files.put_file(str(path), url)

    def download(self, url: str, path: Path) -> None:
        self._files.get_file(url, str(path))

    def remove(self, url: str) -> None:
        self._files.rm(url, recursive=True)


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
