"""Storages of the schemes that fsspec has a driver for."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_checkpoint.storage.interface import Storage, WriteStream

_PART_BYTES = 16 << 20


def storage_of_driver(scheme: str) -> Storage:
    """Return the storage of a scheme that fsspec has a driver for.

    Args:
        scheme: Such as ``"hf"`` or ``"memory"``.

    Raises:
        CheckpointError: If fsspec or the driver is not installed, or fsspec does not know the scheme.
    """
    try:
        import fsspec
    except ImportError as error:
        msg = (
            f"Checkpoints at '{scheme}://' need fsspec, which is not installed. Run `pip install fsspec`, or "
            "`pip install 'booster-checkpoint[storage]'`."
        )
        raise CheckpointError(msg) from error
    try:
        files: Any = fsspec.filesystem(scheme)
    except ImportError as error:
        msg = f"Checkpoints at '{scheme}://' need a driver that is not installed: {error}."
        raise CheckpointError(msg) from error
    except ValueError as error:
        msg = (
            f"No storage is known for '{scheme}://': neither a hook `storage` nor fsspec has one ({error}). Use a "
            "path, or a scheme such as s3, gs, hf, memory."
        )
        raise CheckpointError(msg) from error
    return FsspecStorage(files)


class FsspecStorage:
    """Files of any scheme that fsspec has a driver for.

    Args:
        files: The driver.
    """

    def __init__(self, files: Any) -> None:
        self._files = files

    def list(self, url: str) -> Mapping[str, int]:
        self._files.invalidate_cache()
        base = self._files._strip_protocol(url)  # noqa: SLF001 - how fsspec's own code gets from a URL to a path
        found = self._files.find(url, detail=True)
        return {path[len(base) :].lstrip("/"): int(entry["size"]) for path, entry in found.items()}

    def read(self, url: str, start: int, target: memoryview) -> None:
        end = start + len(target)
        if self._files.async_impl:
            content = self._files.cat_file(url, start=start, end=end)
        else:
            # By default, a file that is opened reads ahead.
            with self._files.open(url, "rb", cache_type="none") as stream:
                stream.seek(start)
                content = stream.read(end - start)
        if len(content) != end - start:
            msg = f"'{url}' ended at byte {start + len(content)} while it was being read. Did something truncate it?"
            raise CheckpointError(msg)
        target[:] = content

    def read_whole(self, url: str) -> bytes | None:
        """Return the content of a small file; ``None`` where there is none."""
        try:
            return bytes(self._files.cat_file(url))
        except FileNotFoundError:
            return None

    def open_write(self, url: str, nbytes: int) -> WriteStream:
        return _RenamedStream(self._files, url, nbytes)

    def remove(self, url: str) -> None:
        self._files.rm(url, recursive=True)


class _RenamedStream:
    """Writes a file under a temporary name in the same folder, through a driver's own file.

    Args:
        files: The driver.
        url: The file.
        nbytes: Its size. With its last byte the driver's file is closed, as drivers keep a block until then.
    """

    def __init__(self, files: Any, url: str, nbytes: int) -> None:
        self._files = files
        self._url = url
        self._missing_bytes = nbytes
        folder, _, name = url.rpartition("/")
        self._temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        if not folder.endswith("/"):
            files.makedirs(folder, exist_ok=True)
        self._stream: Any = files.open(self._temporary, "wb", block_size=_PART_BYTES)
        self._is_closed = False

    def write(self, values: memoryview) -> None:
        self._stream.write(values)
        self._missing_bytes -= values.nbytes
        if self._missing_bytes == 0:
            self._stream.close()

    def close(self) -> None:
        self._stream.close()
        try:
            self._files.mv(self._temporary, self._url)
        except FileExistsError:  # a driver whose renames replace nothing
            self._files.rm_file(self._url)
            self._files.mv(self._temporary, self._url)
        self._is_closed = True

    def discard(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(Exception):
                self._stream.close()
            self._files.rm_file(self._temporary)
