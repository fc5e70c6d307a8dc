"""A folder of saved training states: one folder for each step, and ``latest``, which names the one to go on from.

A step appears under its name complete or not at all; what is being written or removed has a name that starts with a
dot, and the next save clears it away. A failed removal is logged, fails no save, and is tried again by the next one.
A step is never replaced in place: saving the same step once more makes ``step-00000100.1`` and removes
``step-00000100`` after ``latest`` has moved. A job that lost the lease of the root
(`booster_checkpoint.run.lease`) changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from booster_checkpoint.run.lease import LEASE
from booster_checkpoint.run.manifest import MANIFEST, Manifest, verify_folder
from booster_checkpoint.storage.location import sync_folder
from booster_checkpoint.storage.temporary import TEMPORARY, TOKEN_CHARACTERS, new_token
from booster_core.checkpoint_io import LATEST, new_step_name, parse_step_name, step_name
from booster_core.errors import CheckpointError
from booster_core.log import log
from booster_core.state import decode_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from booster_core.checkpoint_io import StepOptions

METRIC = "metric"
"""The manifest's entry that tells how good a step is."""
_HIDDEN_TEXT = re.compile(rf"\.({LATEST}|{re.escape(LEASE)})\.[0-9a-f]{{{TOKEN_CHARACTERS}}}{re.escape(TEMPORARY)}")
_HIDDEN = re.compile(rf"\.step-\d{{8,}}(\.\d+)?\.[0-9a-f]{{{TOKEN_CHARACTERS}}}{re.escape(TEMPORARY)}")


def log_failed_removal(where: str | Path, error: Exception) -> None:
    """Log that an old step, or a part of one, is still there."""
    log.warning("'%s' could not be removed: %s. The next save into this folder tries again.", where, error)


class Steps(ABC):
    """The steps saved under one root. Used on rank 0, which tells the others."""

    root: str

    @abstractmethod
    def prepare(self, hold: Callable[[], None]) -> None:
        """Check the root and clear away what a killed save or removal has left.

        Args:
            hold: Raises `CheckpointError` where another job saves into this root; not called where there is nothing.

        Raises:
            CheckpointError: If the root is no folder.
        """

    @abstractmethod
    def temporary(self, step: int, token: str) -> Path:
        """Return the local folder in which a step is written."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the complete steps' folders, oldest step first."""

    @abstractmethod
    def taken(self) -> list[str]:
        """Return the names that no new step can have."""

    @abstractmethod
    def read_text(self, name: str) -> str | None:
        """Return the content of a small file under the root; ``None`` where there is no such file."""

    @abstractmethod
    def write_text(self, name: str, text: str) -> None:
        """Write a small file under the root, atomically and durably; an older one is replaced."""

    @abstractmethod
    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a step.

        Raises:
            CheckpointError: If it is damaged or can't be read.
        """

    @abstractmethod
    def place(self, temporary: Path, name: str) -> None:
        """Make a complete temporary folder a step's folder, durably; there is none of that name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a step's folder, so that half of it is never seen as a step.

        What remains after that can fail to be removed: it is logged, and cleared away by the next `prepare`.

        Raises:
            OSError: If it is still a step.
        """

    @abstractmethod
    def verify(self, name: str) -> None:
        """Check every byte of a step.

        Raises:
            CheckpointError: If it is damaged.
        """

    def latest_name(self) -> str | None:
        """Return what ``latest`` names; ``None`` where there is no such file."""
        text = self.read_text(LATEST)
        return None if text is None else text.strip()

    def commit(self, temporary: Path, options: StepOptions, hold: Callable[[], None]) -> str:
        """Make a complete temporary folder the latest step, and then remove what is no longer wanted.

        Args:
            temporary: The folder, with its manifest.
            options: Its step, and which steps up to this one stay. Steps beyond it, of a run that went back, stay.
            hold: Raises `CheckpointError` where another job saves into this root by now.

        Returns:
            The name of the step's folder.
        """
        hold()
        # What is there of the same step stays until the new one is in place, and may then fail to be removed.
        name = new_step_name(options.step, self.taken())
        self.place(temporary, name)
        self._keep_only_if_held(name, hold)
        self.write_text(LATEST, f"{name}\n")
        self._remove_obsolete(name, options, hold)
        return name

    def _keep_only_if_held(self, name: str, hold: Callable[[], None]) -> None:
        """Remove a step that is in place, and raise, where another job has taken the root since the save began."""
        try:
            hold()
        except CheckpointError:
            with contextlib.suppress(Exception):  # the lost lease is what matters
                self.remove(name)
            raise

    def _remove_obsolete(self, kept: str, options: StepOptions, hold: Callable[[], None]) -> None:
        """Remove what is no longer wanted. The new step is safe by now, so a failure is logged and not raised."""
        try:
            obsolete = self._obsolete(kept, options)
        except Exception as error:  # noqa: BLE001 - a storage has errors of its own
            log.warning("Old steps in '%s' could not be listed: %s. The next save tries again.", self.root, error)
            return
        for name in obsolete:
            try:
                hold()
                self.remove(name)
            except Exception as error:  # noqa: BLE001 - as above
                log_failed_removal(f"{self.root}/{name}", error)

    def _obsolete(self, kept: str, options: StepOptions) -> list[str]:
        """Return other revisions of a step, and steps before it that no rule keeps."""
        step, steps = options.step, dict[str, int]()
        for name in self.names():
            parsed = parse_step_name(name)
            assert parsed is not None, "names() lists steps"
            steps[name] = parsed[0]
        numbers = {number for number in steps.values() if number <= step}
        metrics, unknown = dict[int, float](), set[int]()
        if options.keep_best is not None:
            metrics, unknown = self._metrics({number: name for name, number in steps.items() if number <= step})
        wanted = options.kept(numbers, metrics) | unknown
        return [
            name
            for name, number in steps.items()
            if name != kept and (number == step or (number < step and number not in wanted))
        ]

    def _metrics(self, steps: Mapping[int, str]) -> tuple[dict[int, float], set[int]]:
        """Return the metrics of steps that have one, and the steps whose manifest can't be read now."""
        metrics, unknown = dict[int, float](), set[int]()
        for number, name in steps.items():
            try:
                value = decode_json(self.manifest(name).facts.get(METRIC))
            except Exception as error:  # noqa: BLE001 - a storage has errors of its own
                log.warning("'%s/%s' is kept, since it is not known how good it is: %s", self.root, name, error)
                unknown.add(number)
                continue
            if isinstance(value, (int, float)):
                metrics[number] = float(value)
        return metrics, unknown

    def candidates(self) -> list[str]:
        """Return the folders to try for the newest whole step: the latest, those before it, then those beyond it.

        Raises:
            CheckpointError: If there is none.
        """
        names = self.names()
        try:
            latest = self.latest_name()
        except OSError:
            latest = None  # unreadable, like a damaged one
        limit = parse_step_name(latest) if latest is not None else None
        if latest not in names:
            found = names[::-1]
        else:
            before = [name for name in names if limit is not None and (parse_step_name(name) or limit) <= limit]
            found = [*before[::-1], *(name for name in names[::-1] if name not in before)]
        if not found:
            found = [self.find(LATEST)]  # which raises
        return found

    def find(self, step: int | str) -> str:
        """Return the folder of a step.

        Args:
            step: A step, or ``"latest"``. Where the file ``latest`` is missing (a step was copied elsewhere by hand),
                the highest step is the latest.

        Raises:
            CheckpointError: If there is no such step.
        """
        names = self.names()
        found = [name for name in names if step == LATEST or (parse_step_name(name) or (None,))[0] == step]
        if step == LATEST:
            latest = self.latest_name()
            if latest is not None and parse_step_name(latest) is None:
                msg = f"The file '{LATEST}' in '{self.root}' is damaged: it names {latest[:100]!r}."
                raise CheckpointError(msg + self.advice(None))
            if latest is not None and latest not in found:
                msg = f"'{self.root}' names '{latest}' as its latest step, but that is missing or lacks its manifest."
                raise CheckpointError(msg + self.advice(latest))
            found = found if latest is None else [latest]
        if found:
            return found[-1]
        if not names:
            msg = (
                f"There is no checkpoint in '{self.root}'. Ask `booster.has_checkpoint(root)` first where a run may "
                "start from nothing."
            )
            raise CheckpointError(msg)
        listed = ", ".join(str((parse_step_name(name) or (name,))[0]) for name in names[-10:])
        msg = f"There is no step {step} in '{self.root}'. Steps there: {listed}."
        raise CheckpointError(msg)

    def advice(self, damaged: str | None) -> str:
        """Return the sentence that names the newest other step that is whole, and how to load it.

        Args:
            damaged: The folder that cannot be used; older steps are looked at first.

        Collective: none; reads every byte of steps until one is whole.
        """
        names = [name for name in reversed(self.names()) if name != damaged]
        limit = parse_step_name(damaged) if damaged else None
        older = [name for name in names if limit is None or (parse_step_name(name) or limit) < limit]
        for name in (*older, *(name for name in names if name not in older)):
            try:
                self.verify(name)
            except CheckpointError:
                continue
            step = (parse_step_name(name) or (0,))[0]
            kind = "older" if name in older and limit is not None else "other"
            return f" The newest {kind} step that is whole is {step}: load it with `step={step}`."
        return " No other step there is whole."


class LocalSteps(Steps):
    """Steps in a folder of the file system.

    Args:
        root: The folder; made by the first save.
    """

    def __init__(self, root: Path) -> None:
        self.path = root
        self.root = str(root)

    def prepare(self, hold: Callable[[], None]) -> None:
        if self.taken():
            hold()
        if self.path.exists() and not self.path.is_dir():
            msg = f"'{self.path}' is a file, but a folder of checkpoints is to be written there. Pass another path."
            raise CheckpointError(msg)
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if _HIDDEN.fullmatch(entry.name):
                    _clear(entry)
                elif _HIDDEN_TEXT.fullmatch(entry.name):
                    try:
                        entry.unlink(missing_ok=True)
                    except OSError as error:
                        log_failed_removal(entry, error)

    def temporary(self, step: int, token: str) -> Path:
        return self.path / f".{step_name(step)}.{token}{TEMPORARY}"

    def names(self) -> list[str]:
        if not self.path.is_dir():
            return []
        found = [(parsed, entry) for entry in self.path.iterdir() if (parsed := parse_step_name(entry.name))]
        return [entry.name for _, entry in sorted(found) if (entry / MANIFEST).is_file()]

    def taken(self) -> list[str]:
        return [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []

    def read_text(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write_text(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{new_token()}{TEMPORARY}"
        try:
            with temporary.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.path)

    def manifest(self, name: str) -> Manifest:
        return Manifest.read(self.path / name)

    def place(self, temporary: Path, name: str) -> None:
        temporary.rename(self.path / name)
        sync_folder(self.path)
        sync_folder(self.path.resolve().parent)

    def remove(self, name: str) -> None:
        hidden = self.path / f".{name}.{new_token()}{TEMPORARY}"
        (self.path / name).rename(hidden)
        _clear(hidden)

    def verify(self, name: str) -> None:
        verify_folder(self.path / name)


def _clear(folder: Path) -> None:
    """Remove a folder that is no step, as far as possible; log what stops it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        try:
            shutil.rmtree(folder)  # once more, for the reason
        except OSError as error:
            log_failed_removal(folder, error)
