"""`Location`: a file or folder, on a local disk or at a URL, and the few questions that checkpoints ask of it.

What is not there is ``None`` or empty. Everything else that goes wrong is an error of one of the kinds in
`booster_core.errors`: a disk or a storage that does not answer says nothing of what it holds, so that no answer is
ever taken for "nothing is there".
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self, override

from booster_checkpoint.storage.failures import storage_errors
from booster_checkpoint.storage.interface import storage_for
from booster_checkpoint.storage.open_file import LocalFile, read_error
from booster_checkpoint.storage.stored_file import REQUESTS_IN_FLIGHT, Requests, StoredFile
from booster_core.checkpoint_io import local_path, scheme_of
from booster_core.errors import CheckpointAbsentError, CheckpointDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from booster_checkpoint.storage.interface import Storage, WriteStream
    from booster_checkpoint.storage.open_file import OpenFile

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""What says that nothing is there. A name too long for the file system is that of no file."""

_DRIVE = re.compile(r"[A-Za-z]:")
_TEMPORARY = ".tmp"
_TOKEN_CHARACTERS = 16
"""Length of the hexadecimal text in temporary names that no two saves share."""


def new_token() -> str:
    """Return text that no other save uses."""
    return secrets.token_hex(_TOKEN_CHARACTERS // 2)


def temporary_name(name: str, token: str | None = None) -> str:
    """Return the name under which a file or folder is written before it gets its own; the next save clears it away."""
    return f".{name}.{token or new_token()}{_TEMPORARY}"


def temporary_pattern(names: str) -> re.Pattern[str]:
    """Return the pattern of the temporary names of all files whose names match a regular expression."""
    return re.compile(rf"\.({names})\.[0-9a-f]{{{_TOKEN_CHARACTERS}}}{re.escape(_TEMPORARY)}")


def leaves_folder(key: str) -> bool:
    """Return whether a key, or a name with ``/`` between its parts, leads out of the folder it is joined to."""
    is_absolute = key.startswith(("/", "\\")) or _DRIVE.match(key) is not None
    return is_absolute or ".." in key.replace("\\", "/").split("/") or "\0" in key


def locate(path: str | Path | Location) -> Location:
    """Return the location of a path or a URL.

    Raises:
        CheckpointError: If there is no storage for the URL's scheme, or the URL is refused.
    """
    if isinstance(path, Location):
        return path
    path = local_path(path)
    scheme = scheme_of(path)
    if scheme is None:
        return LocalLocation(Path(path))
    return StoredLocation(storage_for(scheme), str(path).rstrip("/"))


class Location(ABC):
    """A file or folder, which need not exist. Not collective; each rank asks for itself."""

    is_cached_by_host: ClassVar[bool]
    """Whether what one rank has read is in memory for all ranks of its host."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the path or the URL."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path."""

    @property
    def suffix(self) -> str:
        """The name's ending, with its dot; empty where it has none."""
        return PurePosixPath(self.name).suffix

    @property
    @abstractmethod
    def parent(self) -> Self:
        """The folder that this is in."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Text that is the same however the path is spelled, as by way of a link."""

    @abstractmethod
    def _joined(self, key: str) -> Self: ...

    def __truediv__(self, key: str) -> Self:
        """Return what a key names in this folder.

        Raises:
            CheckpointDamagedError: If the key leads out of the folder.
        """
        if not key or leaves_folder(key):
            msg = f"The name '{key}' leads out of the folder '{self}' that it belongs to. It is damaged or hostile."
            raise CheckpointDamagedError(msg)
        return self._joined(key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @abstractmethod
    def size(self) -> int | None:
        """Return a file's size in bytes; ``None`` where there is no file.

        Raises:
            CheckpointUnreadableError, StorageUnreachableError: If that can't be found out.
        """

    @abstractmethod
    def stamp(self) -> tuple[int, ...]:
        """Return numbers that are equal where hosts see one file, whatever each calls it; none at a URL: all see it."""

    @abstractmethod
    def children(self) -> dict[str, int | None]:
        """Return the names in a folder, sorted, with the sizes of files; empty where there is no folder.

        Raises:
            CheckpointUnreadableError, StorageUnreachableError: If they can't be listed.
        """

    @abstractmethod
    def is_folder(self) -> bool:
        """Return whether there is a folder; at a URL, whether there is anything below it."""

    @abstractmethod
    def read_bytes(self) -> bytes | None:
        """Return what a small file holds now; ``None`` where there is none.

        Raises:
            CheckpointUnreadableError, StorageUnreachableError: If it can't be read.
        """

    @abstractmethod
    def open(self, size: int | None = None) -> OpenFile:
        """Open a file for reads of ranges.

        Args:
            size: Its size, where that is known; at a URL, it is not asked for then.

        Raises:
            CheckpointAbsentError: If there is none.
            CheckpointUnreadableError, StorageUnreachableError: If it can't be opened.
        """

    def open_files(self, sizes: Mapping[str, int | None]) -> Iterator[OpenFile]:
        """Open files of this folder, each when it is asked for; at a URL, their beginnings are read together.

        Args:
            sizes: Their names, with their sizes where these are known.

        Raises:
            CheckpointError: As `open` does.
        """
        for name, size in sizes.items():
            yield (self / name).open(size)

    @abstractmethod
    def open_write(self, nbytes: int) -> WriteStream:
        """Return a stream that writes a file atomically and durably; its folder exists. See `Storage.open_write`.

        Raises:
            OSError, CheckpointError: If it can't be written; the stream's methods raise them, too.
        """

    def write_bytes(self, content: bytes) -> None:
        """Write a small file, atomically and durably, in place of an older one; its folder exists.

        Raises:
            OSError, CheckpointError: If it can't be written.
        """
        stream = self.open_write(len(content))
        try:
            stream.write(memoryview(content))
            stream.close()
        except BaseException:
            with contextlib.suppress(Exception):
                stream.discard()
            raise

    @abstractmethod
    def remove(self) -> None:
        """Remove a file, or a folder and all that is in it.

        Raises:
            OSError, CheckpointError: If something of it stays.
        """

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return `size` of each of these files of this folder; at a URL, several are asked for at a time."""
        return [(self / name).size() for name in names]


class LocalLocation(Location):
    """A file or folder of the file system.

    Args:
        path: Its path.
    """

    is_cached_by_host = True

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def __str__(self) -> str:
        return str(self.path)

    @property
    @override
    def name(self) -> str:
        return self.path.name

    @property
    @override
    def parent(self) -> Self:
        return type(self)(self.path.parent)

    @property
    @override
    def identity(self) -> str:
        return os.path.realpath(self.path)

    @override
    def _joined(self, key: str) -> Self:
        return type(self)(self.path / key)

    @override
    def size(self) -> int | None:
        status = _status(self.path)
        return None if status is None or stat.S_ISDIR(status.st_mode) else status.st_size

    @override
    def stamp(self) -> tuple[int, ...]:
        status = _status(self.path)
        return () if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)

    @override
    def children(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        with _absent_or_unreadable(self.path), os.scandir(self.path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name] = None
                elif (status := _status(self.path / entry.name)) is not None:  # not removed since
                    found[entry.name] = None if stat.S_ISDIR(status.st_mode) else status.st_size
        return found

    @override
    def is_folder(self) -> bool:
        status = _status(self.path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    @override
    def read_bytes(self) -> bytes | None:
        with _absent_or_unreadable(self.path):
            return self.path.read_bytes()
        return None

    @override
    def open(self, size: int | None = None) -> OpenFile:
        return LocalFile(self)

    @override
    def open_write(self, nbytes: int) -> WriteStream:
        return _LocalWrite(self.path)

    @override
    def remove(self) -> None:
        status = _status(self.path, follows=False)
        if status is None:
            return
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(self.path, ignore_errors=True)  # as much as possible
            if self.path.exists():
                shutil.rmtree(self.path)  # once more, for the reason
        else:
            self.path.unlink(missing_ok=True)


class _LocalWrite:
    """Writes a file under a temporary name, until it is on the disk.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(temporary_name(path.name))
        self._stream = self._temporary.open("wb")

    def write(self, values: memoryview) -> None:
        self._stream.write(values)

    def close(self) -> None:
        with self._stream:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._temporary.replace(self._path)
        sync_folders(self._path.parent)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # of what is not wanted any more
            self._stream.close()
        self._temporary.unlink(missing_ok=True)


def _status(path: Path, *, follows: bool = True) -> os.stat_result | None:
    """Return what the file system knows of a path; ``None`` where nothing is."""
    with _absent_or_unreadable(path):
        return path.stat(follow_symlinks=follows)
    return None


@contextlib.contextmanager
def _absent_or_unreadable(path: Path) -> Iterator[None]:
    """End the body where nothing is at a path, and raise every other error of the system as what it is.

    Raises:
        CheckpointUnreadableError: If the disk or the permissions refuse it.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _ABSENT:
            raise read_error(error, path) from error


def sync_folders(*folders: Path) -> None:
    """Make renames in folders last through a loss of power: all at once, which the disk does in the time of one."""
    if len(folders) == 1:
        _sync(folders[0])
        return
    with ThreadPoolExecutor(REQUESTS_IN_FLIGHT, "checkpoint sync") as pool:
        list(pool.map(_sync, folders))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StoredLocation(Location):
    """A file, or what has a common beginning, at a URL. Nothing is kept of what a storage has answered.

    Args:
        storage: Reads and writes there.
        url: The URL, without a ``/`` at its end.
    """

    is_cached_by_host = False

    def __init__(self, storage: Storage, url: str) -> None:
        self.storage = storage
        self.url = url

    @override
    def __str__(self) -> str:
        return self.url

    @property
    @override
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    @override
    def parent(self) -> Self:
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else type(self)(self.storage, above)  # the scheme's own

    @property
    @override
    def identity(self) -> str:
        scheme, mark, rest = self.url.partition("://")
        return scheme.lower() + mark + rest

    @override
    def _joined(self, key: str) -> Self:
        return type(self)(self.storage, f"{self.url}/{key}")

    @override
    def size(self) -> int | None:
        ask = getattr(self.storage, "size", None)  # by one request; storages of third parties need not have it
        with storage_errors(self.url, "looked for"):
            found: int | None = ask(self.url) if ask is not None else self.storage.list(self.url).get("")
        return found

    @override
    def stamp(self) -> tuple[int, ...]:
        return ()

    @override
    def children(self) -> dict[str, int | None]:
        listed = getattr(self.storage, "children", None)  # one level, where a storage can tell it
        found: dict[str, int | None] = {}
        with storage_errors(self.url, "listed"):
            if listed is not None:
                found = dict(listed(self.url))
            else:
                for key, size in self.storage.list(self.url).items():
                    self._check(key)
                    name, below, _ = key.partition("/")
                    if name:
                        found[name] = None if below else size
        for name in found:
            self._check(name)
        return dict(sorted(found.items()))

    def _check(self, key: str) -> None:
        if key and leaves_folder(key):
            msg = f"'{self.url}' holds the key '{key}', which leads out of its folder. It is damaged or hostile."
            raise CheckpointDamagedError(msg)

    @override
    def is_folder(self) -> bool:
        return bool(self.children())

    @override
    def read_bytes(self) -> bytes | None:
        read: Any = getattr(self.storage, "read_whole", None)
        with storage_errors(self.url, "read"):
            if read is not None:
                content: bytes | None = read(self.url)
                return content
        size = self.size()
        if size is None:
            return None
        memory = bytearray(size)
        with storage_errors(self.url, "read"):
            self.storage.read(self.url, 0, memoryview(memory))
        return bytes(memory)

    @override
    def open(self, size: int | None = None, requests: Requests | None = None) -> StoredFile:
        size = self.size() if size is None else size
        if size is None:
            msg = f"There is no '{self}'."
            raise CheckpointAbsentError(msg)
        return StoredFile(self, size, requests or Requests())

    @override
    def open_files(self, sizes: Mapping[str, int | None]) -> Iterator[OpenFile]:
        requests = Requests()
        files = [(self / name).open(size, requests) for name, size in sizes.items()]
        if len(files) > 1:
            try:
                list(requests.pool.map(StoredFile.head, files))
            finally:
                requests.close()
        yield from files

    @override
    def open_write(self, nbytes: int) -> WriteStream:
        with storage_errors(self.url, "written"):
            return _StoredWrite(self.storage.open_write(self.url, nbytes), self.url)

    @override
    def remove(self) -> None:
        with storage_errors(self.url, "removed"):
            self.storage.remove(self.url)

    @override
    def sizes(self, names: Sequence[str]) -> list[int | None]:
        if len(names) < 2:
            return super().sizes(names)
        with ThreadPoolExecutor(REQUESTS_IN_FLIGHT, "checkpoint reader") as pool:
            return list(pool.map(StoredLocation.size, [self / name for name in names]))


class _StoredWrite:
    """A stream whose errors name the URL.

    Args:
        stream: The storage's.
        url: The file.
    """

    def __init__(self, stream: WriteStream, url: str) -> None:
        self._stream = stream
        self._url = url

    def write(self, values: memoryview) -> None:
        with storage_errors(self._url, "written"):
            self._stream.write(values)

    def close(self) -> None:
        with storage_errors(self._url, "written"):
            self._stream.close()

    def discard(self) -> None:
        with storage_errors(self._url, "removed"):
            self._stream.discard()
