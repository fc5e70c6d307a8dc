"""Objects of S3, Google Cloud Storage and Azure, through obstore: requests of its own threads, outside of Python.

What obstore does not do is done here:

- It keeps the memory that it is given until the part has been sent, so each part is a copy that nobody changes.
- A process that was forked from one that has used it hangs or dies. It is refused.
- After a cut connection it repeats no deletes.
- A range beyond the end of a file comes back shorter.
- A key with ``//`` ends a listing of everything around it, and ``folder/``, as consoles create it, looks like a file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from booster_core.errors import CheckpointDamagedError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from booster_checkpoint.storage.interface import WriteStream

OBJECT_SCHEMES = ("s3", "gs", "az")

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
"""Memory of all uploads of a process: these parts, and those that are being filled; for one file 80 MiB."""
_SMALL_BYTES = 1 << 20
"""Files up to this size travel as a whole, when they become visible: one request instead of three."""
_MOST_PARTS = 9_999
"""What S3 takes, less one for the few bytes that are left after parts of equal size."""
_MOST_DELETED = 1000
"""What S3 takes in one request."""
_REQUEST_TIMEOUT = timedelta(seconds=120)
"""obstore's own 30 s are too short for a part over a slow network."""
_CREDENTIALS_LIFETIME = timedelta(minutes=5)
"""boto renews what ends within 10 minutes, so what it gives is valid for as long as this."""
_PAUSES = (0.1, 0.5, 2.0)
"""Seconds before a call whose connection was cut is made again."""

_T = TypeVar("_T")


class ObjectStorage:
    """Objects at URLs of one scheme.

    Args:
        scheme: ``"s3"``, ``"gs"`` or ``"az"``.

    Raises:
        CheckpointError: If obstore is not installed.
    """

    def __init__(self, scheme: str) -> None:
        try:
            import obstore
        except ImportError as error:
            msg = (
                f"Checkpoints at '{scheme}://' need obstore, which is not installed. Run `pip install obstore`, or "
                "`pip install 'booster-checkpoint[storage]'`."
            )
            raise CheckpointError(msg) from error
        self._obstore: Any = obstore
        self._scheme = scheme

    # ---- what is there

    def list(self, url: str) -> Mapping[str, int]:
        store, key = self._at(url)
        with ThreadPoolExecutor(1, "checkpoint reader") as pool:
            asked = pool.submit(self.size, url) if key else None
            below = self._below(store, key)
        try:
            size = None if asked is None else asked.result()
        except self._obstore.exceptions.PermissionDeniedError:  # of who may write below, and not read
            if not below:
                raise
            size = None
        return below if size is None else {"": size, **below}

    def size(self, url: str) -> int | None:
        """Return the size of a file; ``None`` where there is none."""
        store, key = self._at(url)
        try:
            return int(self._obstore.head(store, key)["size"])
        except FileNotFoundError:
            return None

    def children(self, url: str) -> dict[str, int | None]:
        """Return the names directly below a URL, with the sizes of files; ``None`` is the size of a folder."""
        store, key = self._at(url)
        files, folders = self._level(store, key)
        start = len(key) + 1 if key else 0
        sizes: dict[str, int | None] = {path[start:]: size for path, size in files.items()}
        return {**sizes, **{path[start:]: None for path in folders}}

    # ---- content

    def read(self, url: str, start: int, target: memoryview) -> None:
        if not target:
            return
        store, key = self._at(url)
        end = start + len(target)
        try:
            content = memoryview(self._obstore.get_range(store, key, start=start, end=end))
        except self._obstore.exceptions.GenericError as error:
            if "status code: 416" not in str(error):  # nothing of the range is there
                raise
            content = memoryview(b"")
        if len(content) != len(target):
            msg = f"'{url}' ended at byte {start + len(content)} while it was being read. Did something truncate it?"
            raise CheckpointDamagedError(msg)
        target[:] = content

    def read_whole(self, url: str) -> bytes | None:
        """Return the content of a small file; ``None`` where there is none."""
        store, key = self._at(url)
        try:
            return bytes(self._obstore.get(store, key).bytes())
        except FileNotFoundError:
            return None

    def open_write(self, url: str, nbytes: int) -> WriteStream:
        store, key = self._at(url)
        return _ObjectStream(self._obstore, store, key, nbytes)

    # ---- what is removed

    def remove(self, url: str) -> None:
        store, key = self._at(url)
        paths = [f"{key}/{name}" if name and key else name or key for name in self.list(url)]
        for start in range(0, len(paths), _MOST_DELETED):
            self._delete(store, paths[start : start + _MOST_DELETED])

    # ---- requests

    def _at(self, url: str) -> tuple[Any, str]:
        """Return the store of a URL's bucket, and the key."""
        _refuse_forks(url)
        bucket, key = _parts_of(url)
        return _store(self._scheme, bucket, _settings()), key

    def _below(self, store: Any, key: str) -> dict[str, int]:
        """Return the sizes of the files below a key, by their path below it."""
        try:
            pages = self._obstore.list(store, key or None, chunk_size=_MOST_DELETED)
            found = {entry["path"]: int(entry["size"]) for page in pages for entry in page}
        except self._obstore.exceptions.InvalidPathError:
            found = self._walk(store, key)
        folders = {path[:cut] for path in found for cut, letter in enumerate(path) if letter == "/"}
        start = len(key) + 1 if key else 0
        return {
            path[start:]: size
            for path, size in found.items()
            if path not in folders and path != key and (size or self._is_file(store, path))
        }

    def _is_file(self, store: Any, path: str) -> bool:
        """Return whether an empty object is a file, and not a folder's marker, whose key ends with ``/``."""
        try:
            self._obstore.head(store, path)
        except FileNotFoundError:
            return False
        return True

    def _walk(self, store: Any, key: str) -> dict[str, int]:
        """List level by level, past folders that hold keys which obstore refuses. None of them is a checkpoint's."""
        files, folders = self._level(store, key)
        for folder in folders:
            with contextlib.suppress(self._obstore.exceptions.InvalidPathError):
                files.update(self._walk(store, folder))
        return files

    def _level(self, store: Any, key: str) -> tuple[dict[str, int], Iterable[str]]:
        """Return the files directly below a key, with their sizes, and the folders."""
        found = self._obstore.list_with_delimiter(store, key or None)
        files = {entry["path"]: int(entry["size"]) for entry in found["objects"] if entry["path"] != key}
        return files, found["common_prefixes"]

    def _delete(self, store: Any, paths: Sequence[str]) -> None:
        try:
            self._repeated(lambda: self._obstore.delete(store, paths))
        except FileNotFoundError:  # some storages say so of what somebody else has removed
            if len(paths) > 1:
                for path in paths:
                    self._delete(store, [path])

    def _repeated(self, call: Callable[[], _T]) -> _T:
        """Return what a call returns, which is made again after its connection was cut; obstore repeats other calls."""
        for pause in _PAUSES:
            try:
                return call()
            except self._obstore.exceptions.GenericError as error:
                if "status code:" in str(error):  # an answer, which obstore has asked for again
                    raise
                time.sleep(pause)
        return call()


class _ObjectStream:
    """Writes one object, several parts of which travel at a time.

    Parts are of such a size that next to nothing is left after the last, as obstore keeps what fills no part until
    the file is closed.

    Args:
        obstore: The module.
        store: The bucket's.
        key: The object.
        nbytes: Its size.
    """

    def __init__(self, obstore: Any, store: Any, key: str, nbytes: int) -> None:
        self._obstore = obstore
        self._store = store
        self._key = key
        self._missing_bytes = nbytes
        self._is_small = nbytes <= _SMALL_BYTES
        count = 1 if self._is_small else min(-(-nbytes // PART_BYTES), _MOST_PARTS)
        self._part_bytes = nbytes // count
        self._part = _Part()
        self._filled = 0
        self._writer: Any = None
        self._places: list[weakref.finalize[Any, Any]] = []
        self._is_over = False

    def write(self, values: memoryview) -> None:
        values = values.cast("B")
        if len(values) > self._missing_bytes:
            msg = f"{len(values)} bytes are written to a file that lacks {self._missing_bytes}."
            raise CheckpointError(msg)
        while values:
            if not self._part:
                self._part = _Part(min(self._part_bytes, self._missing_bytes))
                self._filled = 0
            taken = values[: len(self._part) - self._filled]
            self._part[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            self._missing_bytes -= len(taken)
            values = values[len(taken) :]
            if self._filled == len(self._part) and not self._is_small:
                self._send()

    def close(self) -> None:
        if self._missing_bytes:
            msg = f"{self._missing_bytes} bytes of a file are missing, so that it can't be made visible."
            raise CheckpointError(msg)
        try:
            if self._is_small:
                self._obstore.put(self._store, self._key, bytes(self._part), use_multipart=False)
            else:
                self._writer.close()
        finally:
            self._leave()
        self._is_over = True

    def discard(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._part = _Part()
        self._leave()
        if self._writer is not None and not self._writer.closed():
            error = InterruptedError("the save has failed")
            self._writer.__exit__(InterruptedError, error, None)  # the only call that aborts an upload

    def _send(self) -> None:
        """Let the part that is full travel, once there is room for it among those that do."""
        if self._writer is None:
            self._writer = self._obstore.open_writer(
                self._store, self._key, buffer_size=self._part_bytes, max_concurrency=PARTS_IN_FLIGHT
            )
        part, self._part = self._part, _Part()
        if len(part) < self._part_bytes:  # the few bytes that are left, which obstore keeps until the file is closed
            self._writer.write(part)
            return
        _room.acquire()
        place = weakref.finalize(part, _room.release)
        place.atexit = False
        self._places.append(place)
        try:
            self._writer.write(part)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """Give back the room of all parts: whoever keeps an error keeps its frames, this stream and its parts."""
        for place in self._places:
            place()


class _Part(bytearray):
    """Memory of a part: obstore lets go of it when the part has been sent, or has failed."""


_room = threading.Semaphore(PARTS_IN_FLIGHT)
"""Bounds the memory of all uploads of a process. Each of them ends by itself, whatever becomes of others."""


# ---- buckets and credentials


def _parts_of(url: str) -> tuple[str, str]:
    """Return the bucket, or container, and the key of a URL."""
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key


class _Settings(NamedTuple):
    """Environment variables that this module reads itself; obstore and boto read others."""

    endpoint: str | None
    attempts: str | None
    has_keys: bool
    profile: str | None


def _settings() -> _Settings:
    told = os.environ.get
    endpoint = told("AWS_ENDPOINT_URL_S3") or told("AWS_ENDPOINT_URL") or told("AWS_ENDPOINT")
    return _Settings(endpoint, told("AWS_MAX_ATTEMPTS"), bool(told("AWS_ACCESS_KEY_ID")), told("AWS_PROFILE"))


_first_process: int | None = None


def _refuse_forks(url: str) -> None:
    """Remember the process that first used obstore.

    Raises:
        CheckpointError: If this one was forked from it.
    """
    global _first_process  # noqa: PLW0603 - obstore's threads are those of a process
    if _first_process is None:
        _first_process = os.getpid()
    if _first_process != os.getpid():
        msg = (
            f"'{url}' can't be used in this process: it was forked from one that has used such a URL, and connections "
            "do not survive a fork. Start processes by `spawn` or `forkserver`, as in "
            "`multiprocessing.get_context('spawn')`, or fork them before the first use."
        )
        raise CheckpointError(msg)


@functools.lru_cache(maxsize=32)
def _store(scheme: str, bucket: str, settings: _Settings) -> Any:
    """Return the store of a bucket, whose connections are shared by all that is read and written there."""
    import obstore.store

    stores: Any = obstore.store
    client_options: dict[str, Any] = {"timeout": _REQUEST_TIMEOUT}
    if scheme == "gs":
        return stores.GCSStore(bucket, client_options=client_options)
    if scheme == "az":
        return stores.AzureStore(bucket, client_options=client_options)
    options: dict[str, Any] = {}
    if settings.attempts:
        options["retry_config"] = {"max_retries": max(int(settings.attempts) - 1, 0)}
    if not settings.has_keys:
        options.update(_options_of_boto(settings))
    endpoint = settings.endpoint or options.get("endpoint", "")
    client_options["allow_http"] = endpoint.startswith("http://")
    return stores.S3Store(bucket, client_options=client_options, **options)


def _options_of_boto(settings: _Settings) -> dict[str, Any]:
    """Return what the files in ``~/.aws`` say, by way of boto; nothing where it is not installed."""
    options: dict[str, Any] = {}
    session = _boto_session(settings)
    if session is None:
        return options
    if (credentials := session.get_credentials()) is not None:
        options["credential_provider"] = _credentials_from(credentials)
    if "AWS_REGION" not in os.environ and (region := session.get_config_variable("region")):
        options["region"] = region
    if settings.endpoint is None and (endpoint := session.get_scoped_config().get("endpoint_url")):
        options["endpoint"] = endpoint
    return options


@functools.lru_cache(maxsize=4)
def _boto_session(settings: _Settings) -> Any:
    """Return a session of boto, which knows profiles and SSO; ``None`` where it is not installed."""
    del settings  # it reads them itself; others need another session
    try:
        import botocore.session
    except ImportError:
        return None
    return botocore.session.get_session()


def _credentials_from(credentials: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that obstore asks for credentials, each time that the last ones have ended."""

    def ask() -> dict[str, Any]:
        found = credentials.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(timezone.utc) + _CREDENTIALS_LIFETIME,
        }

    return ask
