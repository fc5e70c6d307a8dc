"""Steps at a URL, where nothing can be renamed: a step is complete once its manifest is there, which comes last.

Files of a step are uploaded to its folder as they are written, the manifest after them, and ``latest`` after that. A
step whose save failed has no manifest: it is no step, and the next save removes it.

Below a root there may be other runs, and all else that a bucket holds: listed are the names in the root, and the
manifests of its steps are asked for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from booster_checkpoint.run.manifest import MANIFEST, Manifest, verify_folder
from booster_checkpoint.run.steps import LocalSteps, Steps, log_failed_removal
from booster_checkpoint.storage import RemotePath, path_at
from booster_checkpoint.storage.location import StoredLocation
from booster_core.checkpoint_io import LATEST, new_step_name, parse_step_name
from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from booster_core.checkpoint_io import StepOptions


def open_steps(root: str | Path) -> Steps:
    """Return the steps at a path or a URL.

    Raises:
        CheckpointError: If there is no storage for the URL.
    """
    path = path_at(root)
    return RemoteSteps(path) if isinstance(path, RemotePath) else LocalSteps(path)


def folder_of(steps: Steps, name: str) -> Path:
    """Return the folder of a step."""
    if isinstance(steps, RemoteSteps):
        return (steps.path / name).alone()  # not by a list of everything below the root
    assert isinstance(steps, LocalSteps), "there are two kinds"
    return steps.path / name


class RemoteSteps(Steps):
    """Steps at a URL.

    Args:
        path: The URL.
    """

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.root = str(path)
        self._location = StoredLocation(path.storage, str(path))
        self._taken: list[str] | None = None
        self._names: list[str] | None = None

    def prepare(self, hold: Callable[[], None]) -> None:
        self._forget()
        with ThreadPoolExecutor(2, "checkpoint writer") as pool:
            # Uploads that a killed save has begun are in no list of files.
            unfinished = pool.submit(self._unfinished)
            size = pool.submit(self._location.size)
            self.names()
        if size.result() is not None:
            msg = f"'{self.root}' is a file, but a folder of checkpoints is to be written there. Pass another URL."
            raise CheckpointError(msg)
        if self.taken():
            hold()
        left = sorted(name for name in set(self.taken()) - set(self.names()) if parse_step_name(name))
        for name in left:
            self._clear(name)
        if left:
            self._forget()
        if uploads := unfinished.result():
            self._try_on_uploads("abort", uploads)

    def _unfinished(self) -> Sequence[Any]:
        """Return the uploads that saves of this run have left, and not those of runs below its root."""
        start = f"{self.root}/step-"
        found: Sequence[tuple[str, Any]] = self._try_on_uploads("unfinished", start) or ()
        return [upload for url, upload in found if parse_step_name(url[len(self.root) + 1 :].partition("/")[0])]

    def _try_on_uploads(self, method: str, argument: Any) -> Any:
        """Call a method that storages with uploads in parts have; log what stops it."""
        call = getattr(self.path.storage, method, None)
        if call is None:
            return None
        try:
            return call(argument)
        except Exception as error:  # noqa: BLE001 - a storage has errors of its own
            log_failed_removal(self.root, error)
            return None

    def temporary(self, step: int, token: str) -> Path:
        """Return the step's own folder, in which it is written."""
        del token
        return (self.path / new_step_name(step, self.taken())).alone()

    def names(self) -> list[str]:
        if self._names is None:
            found = sorted(filter(parse_step_name, self.taken()), key=lambda name: parse_step_name(name) or (0, 0))
            sizes = self._location.sizes([f"{name}/{MANIFEST}" for name in found])
            self._names = [name for name, size in zip(found, sizes, strict=True) if size is not None]
        return self._names

    def taken(self) -> list[str]:
        if self._taken is None:
            self._taken = list(self._location.children())
        return self._taken

    def _forget(self) -> None:
        """See what has been written and removed since the root was looked at."""
        self._taken = self._names = None

    def read_text(self, name: str) -> str | None:
        content = (self.path / name).read_now()
        return None if content is None else content.decode(errors="replace")

    def write_text(self, name: str, text: str) -> None:
        (self.path / name).write_bytes(text.encode())

    def manifest(self, name: str) -> Manifest:
        return Manifest.read((self.path / name).alone())

    def place(self, temporary: Path, name: str) -> None:
        """Do nothing: a step is written where it stays."""

    def commit(self, temporary: Path, options: StepOptions, hold: Callable[[], None]) -> str:
        self._keep_only_if_held(temporary.name, hold)
        self.write_text(LATEST, f"{temporary.name}\n")
        self._forget()
        self._remove_obsolete(temporary.name, options, hold)
        return temporary.name

    def remove(self, name: str) -> None:
        (self.path / name / MANIFEST).remove()  # without it, the rest is no step any more
        self._clear(name)

    def _clear(self, name: str) -> None:
        """Remove the files of what is no step; log what stops it."""
        try:
            folder = (self.path / name).alone()
            if folder.exists():
                folder.remove()
        except Exception as error:  # noqa: BLE001 - a storage has errors of its own
            log_failed_removal(f"{self.root}/{name}", error)

    def verify(self, name: str) -> None:
        verify_folder((self.path / name).alone())
