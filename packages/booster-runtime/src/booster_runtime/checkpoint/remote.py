"""Models, optimizers and schedulers at URLs: written to a local temporary path and uploaded, downloaded and read.

An index is uploaded after the files that it names. Whole training states have an order of their own
(`booster_runtime.checkpoint.run.steps_remote`).
"""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from booster_core.errors import CheckpointError, ConfigError
from booster_runtime.checkpoint.files.layout import OPTIMIZER
from booster_runtime.checkpoint.run.steps_remote import copied_once_per_host, download
from booster_runtime.checkpoint.save.writer import as_checkpoint_error
from booster_runtime.storage import storage_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from booster_core.ranks import DistCoordinator
    from booster_runtime.checkpoint.session import Session
    from booster_runtime.storage import Storage

METADATA = ".metadata"
"""The file that makes a folder one of ``torch.distributed.checkpoint``; all files of such a folder belong together."""
_TRANSFER_TIMEOUT_SECONDS = 24 * 3600.0
_NUMBERED = re.compile(r"(.+)-\d{5,}-of-\d{5,}(\.\w+)")


@contextmanager
def local_target(
    coordinator: DistCoordinator, checkpoint: str, call: str, *, use_async: bool = False
) -> Iterator[Path]:
    """Give the local path to write to; what is there after the body is uploaded.

    Args:
        coordinator: The ranks.
        checkpoint: A URL.
        call: What the user called.
        use_async: Whether the body returns before everything is written.

    Raises:
        ConfigError: If that is asked for.
        CheckpointError: If there is no storage for the URL, or the upload failed.

    Collective: every rank.
    """
    if use_async:
        msg = (
            f"`use_async=True` cannot write to '{checkpoint}': a model at a URL is uploaded before the call returns. "
            "Drop one of them, or use `save_checkpoint`, which uploads in the background."
        )
        raise ConfigError(msg)
    url, scheme = checkpoint.rstrip("/"), checkpoint.partition(":")[0].lower()
    folder: Path | None = None
    storage: Storage | None = None
    error: Exception | None = None
    try:
        if coordinator.rank == 0:
            try:
                storage = storage_for(scheme)
                folder = Path(tempfile.mkdtemp(prefix="booster-"))
            except Exception as caught:  # noqa: BLE001 - the other ranks have to hear of it
                error = as_checkpoint_error(caught, Path(tempfile.gettempdir()))
        coordinator.raise_together(error, name=call)
        path = Path(coordinator.broadcast_object(folder)) / url.rpartition("/")[2]
        yield path
        if storage is not None:
            try:
                _upload(storage, path, url)
            except Exception as caught:  # noqa: BLE001 - the other ranks have to hear of it
                error = _transfer_error(caught, url, "written")
        limit = max(coordinator.timeout_seconds, _TRANSFER_TIMEOUT_SECONDS)
        coordinator.raise_together(error, name=call, timeout_seconds=limit)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def local_source(session: Session, checkpoint: str, kind: str) -> Iterator[Path]:
    """Give the local path to read from: a copy on each host, until the body ends.

    Args:
        session: The ranks.
        checkpoint: A URL.
        kind: ``"model"``, ``"optimizer"`` or another; of a folder at a URL, only that kind's files are copied.

    Raises:
        CheckpointError: If there is no storage for the URL, or nothing at it.

    Collective: every rank.
    """
    url, scheme = checkpoint.rstrip("/"), checkpoint.partition(":")[0].lower()
    name = url.rpartition("/")[2]

    def copy(folder: Path) -> None:
        try:
            _download(storage_for(scheme), url, folder, name, _is_of(kind))
        except OSError as error:
            raise _transfer_error(error, url, "read") from error

    with copied_once_per_host(session, copy) as folder:
        yield folder / name


def _is_of(kind: str) -> Callable[[str], bool]:
    def is_wanted(path: str) -> bool:
        is_optimizer = path.startswith((OPTIMIZER, "param_groups"))
        return "/" not in path and is_optimizer == (kind == OPTIMIZER)

    return is_wanted


def _upload(storage: Storage, path: Path, url: str) -> None:
    if path.is_file():
        storage.upload(path, url)
        return
    files = sorted(entry for entry in path.rglob("*") if entry.is_file())
    files.sort(key=lambda entry: ".index." in entry.name or entry.name == METADATA)  # last, in a stable order
    stems = {match.groups() for entry in files if (match := _NUMBERED.fullmatch(entry.name))}
    written = {entry.relative_to(path).as_posix() for entry in files}
    for entry in files:
        storage.upload(entry, f"{url}/{entry.relative_to(path).as_posix()}")
    for old in storage.list(url):
        match = _NUMBERED.fullmatch(old)
        if match is not None and match.groups() in stems and old not in written:
            storage.remove(f"{url}/{old}")


def _download(storage: Storage, url: str, folder: Path, name: str, is_wanted: Callable[[str], bool]) -> None:
    files = storage.list(url)
    if "" in files:
        parent = url.rpartition("/")[0]
        storage.download(url, folder / name)
        if name.endswith(".json") and ".index." in name:  # an index: its folder is meant
            download(storage, parent, folder, lambda path: "/" not in path and path != name)
        return
    download(storage, url, folder / name, is_wanted if METADATA not in files else lambda _: True)


def _transfer_error(error: Exception, url: str, verb: str) -> Exception:
    if isinstance(error, OSError):
        failure = CheckpointError(f"'{url}' could not be {verb}: {error.strerror or error}.")
        failure.__cause__ = error
        return failure
    return error
