"""Files and folders at URLs with the methods of `pathlib.Path` that checkpoints are read with.

So what reads a checkpoint reads it at a URL too, straight from there: no file is copied to a local disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from typing_extensions import Self, override

from booster_checkpoint.storage.failures import storage_errors
from booster_checkpoint.storage.interface import leaves_folder, storage_for
from booster_checkpoint.storage.range_stream import RangeStream
from booster_core.checkpoint_io import local_path, scheme_of
from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from booster_checkpoint.storage.interface import Storage, WriteStream

    _PathMethods = Path
else:
    _PathMethods = object

REQUEST_BYTES = 8 << 20
"""Larger ranges are read by several requests at a time."""
REQUESTS_IN_FLIGHT = 8
HEAD_BYTES = 1 << 16
"""What is read of a file when it is opened: most headers are smaller."""


def path_at(checkpoint: str | Path) -> Path:
    """Return the path of a checkpoint: a `RemotePath` for a URL.

    Raises:
        CheckpointError: If there is no storage for the URL's scheme, or the URL is refused.
    """
    if isinstance(checkpoint, RemotePath):
        return checkpoint
    checkpoint = local_path(checkpoint)
    scheme = scheme_of(checkpoint)
    if scheme is None:
        return Path(checkpoint)
    return RemotePath(storage_for(scheme), str(checkpoint).rstrip("/"))


class _Tree:
    """What is at a URL and below it: listed once, when first needed.

    Args:
        storage: Reads there.
        url: The URL.
        files: What is there, where that is known.
    """

    def __init__(self, storage: Storage, url: str, files: Mapping[str, int] | None = None) -> None:
        self.storage = storage
        self.url = url
        self._lock = threading.Lock()
        self._files = files
        self._pool: ThreadPoolExecutor | None = None
        self._heads: dict[str, bytes] = {}

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for requests."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, "checkpoint reader")
            return self._pool

    def files(self) -> Mapping[str, int]:
        """Return the sizes of files by their path below the URL, ``""`` for a file at the URL itself.

        Raises:
            CheckpointError: If a key leads out of its folder.
        """
        with self._lock:
            if self._files is None:
                with storage_errors(self.url, "listed"):
                    found = self.storage.list(self.url)
                for key in found:
                    if leaves_folder(key):
                        msg = (
                            f"'{self.url}' holds the key '{key}', which leads out of its folder. It is damaged or "
                            "hostile."
                        )
                        raise CheckpointError(msg)
                self._files = found
            return self._files

    def close(self) -> None:
        """End the threads, until they are needed again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def forget(self) -> None:
        """List again when next needed."""
        with self._lock:
            self._files = None
            self._heads = {}

    def head(self, url: str, nbytes: int) -> bytes:
        """Return the beginning of a file, read once."""
        if url not in self._heads:
            content = bytearray(min(nbytes, HEAD_BYTES))
            with storage_errors(url, "read"):
                self.storage.read(url, 0, memoryview(content))
            self._heads[url] = bytes(content)
        return self._heads[url]


class RemotePath(_PathMethods):
    """A file or folder at a URL.

    To a type checker this is a `Path`, so that what reads local files reads these too. Only the methods below exist.

    Args:
        storage: Reads and writes there.
        url: The URL, without a ``/`` at its end.
        files: The sizes of files below it, by their paths, where they are known.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        files: Mapping[str, int] | None = None,
        *,
        _tree: _Tree | None = None,
        _key: str = "",
    ) -> None:
        self._tree = _tree or _Tree(storage, url, files)
        self._key = _key
        self.storage = storage
        self.url = url

    # ---- names

    @override
    def __str__(self) -> str:
        return self.url

    @override
    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.url == other.url

    @override
    def __hash__(self) -> int:
        return hash(self.url)

    @override
    def __lt__(self, other: Any) -> bool:
        return self.url < str(other)

    @property
    @override
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    @override
    def suffix(self) -> str:
        stem, dot, ending = self.name.rpartition(".")
        return dot + ending if stem else ""

    @property
    @override
    def parent(self) -> RemotePath:
        url, _, _ = self.url.rpartition("/")
        if url.endswith("/"):  # the scheme's
            return self
        if self._key:
            return RemotePath(self.storage, url, _tree=self._tree, _key=self._key.rpartition("/")[0])
        return RemotePath(self.storage, url)

    @override
    def __truediv__(self, key: Any) -> RemotePath:
        key = str(key)
        if leaves_folder(key):
            msg = f"The name '{key}' leads out of the folder '{self.url}' that it belongs to. It is damaged or hostile."
            raise CheckpointError(msg)
        inner = f"{self._key}/{key}" if self._key else key
        return RemotePath(self.storage, f"{self.url}/{key}", _tree=self._tree, _key=inner)

    @override
    def relative_to(self, *other: Any) -> Path:  # type: ignore[override]
        assert self.url.startswith(f"{other[0]}/"), "asked of what is below"
        return Path(self.url[len(str(other[0])) + 1 :])

    # ---- what is there

    def forget(self) -> None:
        """See what others have written since this path, or the one that it was made from, was first looked at."""
        self._tree.forget()

    def alone(self) -> RemotePath:
        """Return the same path, looked at by itself and not by a listing of the folder that it was made from."""
        return RemotePath(self.storage, self.url)

    def files(self) -> dict[str, int]:
        """Return the sizes of all files below this folder, by their path below it."""
        start = f"{self._key}/" if self._key else ""
        return {key[len(start) :]: size for key, size in self._tree.files().items() if key and key.startswith(start)}

    def _size(self) -> int | None:
        return self._tree.files().get(self._key)

    @override
    def is_file(self, *_: Any, **__: Any) -> bool:
        return self._size() is not None

    @override
    def is_dir(self, *_: Any, **__: Any) -> bool:
        return not self.is_file() and bool(self.files())

    @override
    def exists(self, *_: Any, **__: Any) -> bool:
        return self.is_file() or bool(self.files())

    @override
    def iterdir(self) -> Iterator[Self]:  # type: ignore[override]
        for name in sorted({key.partition("/")[0] for key in self.files()}):
            yield self / name  # type: ignore[misc]

    @override
    def stat(self, *_: Any, **__: Any) -> os.stat_result:
        """Return the size; nothing else is known."""
        return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, self._checked_size(), 0, 0, 0))

    def _checked_size(self) -> int:
        size = self._size()
        if size is None:
            raise FileNotFoundError(2, "No such file", self.url)
        return size

    # ---- content

    def open_ranges(self) -> RemoteFile:
        """Open the file for reads of ranges.

        Raises:
            FileNotFoundError: If there is none.
        """
        return RemoteFile(self, self._tree, self._checked_size())

    @override
    def open(self, mode: str = "r", *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]
        assert mode == "rb", "written by `open_write` alone"
        file = self.open_ranges()
        return io.BufferedReader(RangeStream(file, 0, file.size, file.close), HEAD_BYTES)

    @override
    def read_bytes(self) -> bytes:
        file = self.open_ranges()
        content = bytearray(file.size)
        file.read_into(memoryview(content), 0)
        file.close()
        return bytes(content)

    @override
    def read_text(self, encoding: str | None = None, errors: str | None = None, *_: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open_write(self, nbytes: int) -> WriteStream:
        """Return a stream that writes this file; see `Storage.open_write`."""
        with storage_errors(self.url, "written"):
            return _CheckedStream(self.storage.open_write(self.url, nbytes), self.url)

    @override
    def write_bytes(self, data: Any) -> int:
        stream = self.open_write(len(data))
        try:
            stream.write(memoryview(data))
            stream.close()
        except BaseException:
            with contextlib.suppress(Exception):
                stream.discard()
            raise
        return len(data)

    @override
    def unlink(self, missing_ok: bool = False) -> None:
        if not self.is_file():
            if missing_ok:
                return
            raise FileNotFoundError(2, "No such file", self.url)
        self.remove()
        self.forget()

    def remove(self) -> None:
        """Remove the file, or all files below the folder; there is something."""
        with storage_errors(self.url, "removed"):
            self.storage.remove(self.url)


class _CheckedStream:
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


class _Ahead(Protocol):
    """Reads ahead what will be asked for."""

    def take(self, file: RemoteFile, target: memoryview, offset: int) -> bool:
        """Fill ``target`` where all of it is being read ahead; return whether that is so."""


class RemoteFile:
    """A file at a URL, open for reads of ranges from several threads.

    Args:
        path: The file.
        tree: What it belongs to.
        size: Its size in bytes.

    Attributes:
        ahead: Reads ahead of this file, where somebody knows what will be asked for.
    """

    def __init__(self, path: RemotePath, tree: _Tree, size: int) -> None:
        self.path = path
        self.size = size
        self._tree = tree
        self.ahead: _Ahead | None = None

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for requests, shared with other files of the same checkpoint."""
        return self._tree.pool

    def close(self) -> None:
        """End the threads of all files of the same checkpoint, if none of them is being read."""
        self._tree.close()

    def read_head(self) -> None:
        """Read the beginning of the file, and keep it for reads to come."""
        self._tree.head(self.path.url, self.size)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` from a byte offset on.

        Raises:
            CheckpointError: If the file ends before that, or cannot be read.
        """
        if offset + len(target) > self.size:
            msg = f"'{self.path}' ended at byte {self.size} while it was being read. Did something truncate it?"
            raise CheckpointError(msg)
        if offset + len(target) <= HEAD_BYTES:
            head = self._tree.head(self.path.url, self.size)
            target[:] = head[offset : offset + len(target)]
        elif self.ahead is None or not self.ahead.take(self, target, offset):
            cut = range(0, len(target), REQUEST_BYTES)
            if len(cut) == 1:
                self.request(target, offset)
            else:
                parts = [(target[start : start + REQUEST_BYTES], offset + start) for start in cut]
                list(self.pool.map(lambda part: self.request(*part), parts))

    def request(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` by one request."""
        with storage_errors(self.path.url, "read"):
            self._tree.storage.read(self.path.url, offset, target)


def read_heads(paths: Iterable[Path]) -> None:
    """Read the beginnings of files at URLs, several at a time, for those who open them next; leave out local files."""
    remote = [path for path in paths if isinstance(path, RemotePath)]
    if len(remote) > 1:
        files = [path.open_ranges() for path in remote]
        list(files[0].pool.map(RemoteFile.read_head, files))
        files[0].close()
