"""Steps at a URL, where nothing can be renamed: a step is complete once its manifest is there, which comes last.

A step is written to the local disk of rank 0 first and then uploaded by it, file by file, manifest last, ``latest``
after that. To be read, a step is copied to a temporary folder, once on each host. So only rank 0 and one rank of each
further host use the storage, and a storage of one process' own (``memory://``) serves all ranks of its host.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from booster_core.errors import CheckpointError
from booster_core.ranks import this_host
from booster_runtime.checkpoint.files.layout import TEMPORARY
from booster_runtime.checkpoint.run.manifest import MANIFEST, Manifest, verify_folder
from booster_runtime.checkpoint.run.steps import LocalSteps, Steps, folder_name, log_failed_removal, parse_name
from booster_runtime.checkpoint.save.writer import as_checkpoint_error
from booster_runtime.storage import leaves_folder, local_path, scheme_of, storage_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from booster_runtime.checkpoint.session import Session
    from booster_runtime.storage import Storage


def open_steps(root: str | Path) -> Steps:
    """Return the steps at a path or a URL.

    Collective: none.
    """
    root = local_path(root)
    scheme = scheme_of(root)
    return LocalSteps(Path(root)) if scheme is None else RemoteSteps(str(root).rstrip("/"), storage_for(scheme))


class RemoteSteps(Steps):
    """Steps at a URL.

    Args:
        root: The URL.
        storage: Reads and writes there.
    """

    def __init__(self, root: str, storage: Storage) -> None:
        self.root = root
        self._storage = storage

    def prepare(self) -> None:
        files = self._storage.list(self.root)
        if "" in files:
            msg = f"'{self.root}' is a file, but a folder of checkpoints is to be written there. Pass another URL."
            raise CheckpointError(msg)
        complete = set(self.names())
        for name in {path.partition("/")[0] for path in files} - complete:
            if parse_name(name):
                self._clear(name)

    def temporary(self, step: int, token: str) -> Path:
        return Path(tempfile.gettempdir()) / f"booster-{folder_name(step)}.{token}{TEMPORARY}"

    def names(self) -> list[str]:
        found = [path.removesuffix(f"/{MANIFEST}") for path in self._storage.list(self.root)]
        return sorted((name for name in found if parse_name(name)), key=lambda name: parse_name(name) or (0, 0))

    def taken(self) -> list[str]:
        return sorted({path.partition("/")[0] for path in self._storage.list(self.root)})

    def read_text(self, name: str) -> str | None:
        if "" not in self._storage.list(f"{self.root}/{name}"):
            return None
        with tempfile.TemporaryDirectory(prefix="booster-") as folder:
            self._storage.download(f"{self.root}/{name}", Path(folder) / name)
            return (Path(folder) / name).read_text(encoding="utf-8", errors="replace")

    def write_text(self, name: str, text: str) -> None:
        with tempfile.TemporaryDirectory(prefix="booster-") as folder:
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            self._storage.upload(path, f"{self.root}/{name}")

    def manifest(self, name: str) -> Manifest:
        with tempfile.TemporaryDirectory(prefix="booster-") as folder:
            self._storage.download(f"{self.root}/{name}/{MANIFEST}", Path(folder) / MANIFEST)
            return Manifest.read(Path(folder))

    def place(self, temporary: Path, name: str) -> None:
        files = sorted(path for path in temporary.rglob("*") if path.is_file() and path.name != MANIFEST)
        for path in [*files, temporary / MANIFEST]:
            self._storage.upload(path, f"{self.root}/{name}/{path.relative_to(temporary).as_posix()}")
        shutil.rmtree(temporary)

    def remove(self, name: str) -> None:
        self._storage.remove(f"{self.root}/{name}/{MANIFEST}")  # without it, the rest is no step any more
        self._clear(name)

    def _clear(self, name: str) -> None:
        """Remove the files of what is no step; log what stops it."""
        try:
            if self._storage.list(f"{self.root}/{name}"):
                self._storage.remove(f"{self.root}/{name}")
        except Exception as error:  # noqa: BLE001 - a storage has errors of its own
            log_failed_removal(f"{self.root}/{name}", error)

    def verify(self, name: str) -> None:
        with tempfile.TemporaryDirectory(prefix="booster-") as folder:
            download(self._storage, f"{self.root}/{name}", Path(folder) / name, lambda _: True)
            verify_folder(Path(folder) / name)

    def download(self, name: str, wanted: Sequence[str], folder: Path) -> None:
        """Copy the wanted files and folders of a step, and its manifest, into a local folder."""

        def is_wanted(path: str) -> bool:
            return path == MANIFEST or any(path == want or path.startswith(f"{want}/") for want in wanted)

        download(self._storage, f"{self.root}/{name}", folder, is_wanted)


def download(storage: Storage, url: str, folder: Path, is_wanted: Callable[[str], bool]) -> None:
    """Copy files below a URL into a local folder.

    Raises:
        CheckpointError: If there is none, or a key leads out of the folder; nothing has been copied then.

    Collective: none.
    """
    files = [path for path in storage.list(url) if path and is_wanted(path)]
    if not files:
        msg = (
            f"There is nothing to load at '{url}', as host '{socket.gethostname()}' sees it. A storage of one process "
            "or host cannot serve others."
        )
        raise CheckpointError(msg)
    for path in files:
        if leaves_folder(path):
            msg = f"'{url}' holds the key '{path}', which leads out of its folder. It is damaged or hostile."
            raise CheckpointError(msg)
    for path in files:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        storage.download(f"{url}/{path}", target)


@contextmanager
def local_copy(session: Session, steps: Steps, name: str, wanted: Sequence[str]) -> Iterator[Path]:
    """Give a step's folder as every rank can read it: itself, or a copy that is removed afterwards.

    Collective: every rank.
    """
    if isinstance(steps, LocalSteps):
        yield steps.path / name
        return
    assert isinstance(steps, RemoteSteps), "there are two kinds"
    with copied_once_per_host(session, lambda folder: steps.download(name, wanted, folder / name)) as folder:
        yield folder / name


@contextmanager
def copied_once_per_host(session: Session, copy: Callable[[Path], None]) -> Iterator[Path]:
    """Let one rank of each host fill a temporary folder, and give all of its ranks that folder until the body ends.

    Args:
        session: The ranks.
        copy: Fills a folder; called on the first rank of each host.

    Collective: every rank.
    """
    coordinator = session.coordinator
    hosts = coordinator.all_gather_object(this_host())
    leader = hosts.index(hosts[session.rank])
    own: Path | None = None
    error: Exception | None = None
    try:
        if leader == session.rank:
            try:
                own = Path(tempfile.mkdtemp(prefix="booster-"))
                copy(own)
            except Exception as caught:  # noqa: BLE001 - the other ranks have to hear of it
                error = as_checkpoint_error(caught, own or Path(tempfile.gettempdir()))
        limit = max(coordinator.timeout_seconds, 24 * 3600.0)
        coordinator.raise_together(error, name="copy a checkpoint", timeout_seconds=limit)
        folder = coordinator.all_gather_object(own)[leader]
        yield folder
        coordinator.raise_together(None, name="copy a checkpoint", timeout_seconds=limit)
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
