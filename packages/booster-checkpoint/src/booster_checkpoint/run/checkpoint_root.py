"""`CheckpointRoot`: a folder of saved training states, on a disk or at a URL.

It holds a folder for each step; ``latest``, which names the step to go on from; and ``lease.json``, which says which
job may save here (`booster_checkpoint.run.lease`). A step is saved in this order, each after the one before is
durable::

    prepare_new_folder    the lease is held; remains of killed saves go; a folder that is no step yet
    (files, manifest)     all of the step; at a URL its manifest makes it a step
    place                 on a disk the folder gets its name now; taken back if the lease was lost meanwhile
    write_latest          what a resume reads first
    prune                 steps that no rule keeps; a failure is logged, and tried again by the next save

A step is never replaced in place: saving the same step once more makes ``step-00000100.1`` and removes
``step-00000100`` after ``latest`` has moved. Only a step's own manifest says whether it is complete: a listing may lag
behind, so nothing is removed, and no older step taken, before the manifest itself was asked for.
"""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from typing_extensions import override

from booster_checkpoint.run.lease import LEASE
from booster_checkpoint.run.manifest import MANIFEST, Manifest, verify_folder
from booster_checkpoint.storage.location import (
    LocalLocation,
    Location,
    StoredLocation,
    locate,
    sync_folders,
    temporary_name,
    temporary_pattern,
)
from booster_core.checkpoint_io import LATEST, new_step_name, parse_step_name, step_name
from booster_core.errors import (
    CheckpointAbsentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointUnreadableError,
    ConfigError,
    StorageUnreachableError,
)
from booster_core.log import log
from booster_core.state import decode_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn

    from booster_core.checkpoint_io import StepOptions

METRIC = "metric"
"""The manifest's entry that tells how good a step is."""
_STEPS_IN_THE_MAKING = temporary_pattern(r"step-\d{8,}(\.\d+)?")
_TEXTS_IN_THE_MAKING = temporary_pattern(f"{LATEST}|{re.escape(LEASE)}")
_Place = TypeVar("_Place", bound=Location)


def open_run(root: str | Path | Location) -> CheckpointRoot:
    """Return the folder of a run at a path or a URL, which need not exist.

    Raises:
        CheckpointError: If there is no storage for the URL.
    """
    place = locate(root)
    return StoredRun(place) if isinstance(place, StoredLocation) else LocalRun(_local(place))


def _local(place: Location) -> LocalLocation:
    assert isinstance(place, LocalLocation), "there are two kinds"
    return place


class CheckpointRoot(ABC):
    """The steps saved under one root. Used on rank 0, which tells the others, except for `folder`."""

    root: Location

    def __str__(self) -> str:
        return str(self.root)

    # ---- what a disk and a storage do in different ways

    @abstractmethod
    def prepare_new_folder(self, step: int, hold: Callable[[], None]) -> Location:
        """Check the root, clear away what a killed save or removal has left, and return where to write a step.

        Args:
            step: The step to be written.
            hold: Raises `CheckpointError` where another job saves into this root; not called where there is nothing.

        Raises:
            CheckpointError: If the root is no folder, or can't be looked into.
        """

    @abstractmethod
    def place(self, folder: Location, step: int) -> str:
        """Give a folder that is complete the name of its step, durably, and return it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a step, so that half of it is never seen as a step.

        What remains after that can fail to be removed: it is logged, and cleared away by the next save.

        Raises:
            OSError, CheckpointError: If it is still a step.
        """

    # ---- what is there

    def folder(self, name: str) -> Location:
        """Return the folder of a step."""
        return self.root / name

    def steps(self) -> list[str]:
        """Return the names of complete steps, oldest first."""
        return self._complete(self._names())

    def _names(self) -> list[str]:
        """Return what may be steps, oldest first."""
        found = [(parsed, name) for name in self.root.children() if (parsed := parse_step_name(name))]
        return [name for _, name in sorted(found)]

    def _complete(self, names: list[str]) -> list[str]:
        """Return the names of complete steps among some; their manifests are asked for, not a listing."""
        sizes = self.root.sizes([f"{name}/{MANIFEST}" for name in names])
        return [name for name, size in zip(names, sizes, strict=True) if size is not None]

    def is_complete(self, name: str) -> bool:
        """Return whether a step has its manifest."""
        return bool(self._complete([name]))

    def manifest(self, name: str) -> Manifest:
        """Return a step's manifest; errors are those of `Manifest.read`."""
        return Manifest.read(self.folder(name))

    def latest_name(self) -> str | None:
        """Return what ``latest`` names; ``None`` where there is no such file."""
        content = (self.root / LATEST).read_bytes()
        return None if content is None else content.decode(errors="replace").strip()

    def write_latest(self, name: str) -> None:
        """Make a step the one to go on from."""
        (self.root / LATEST).write_bytes(f"{name}\n".encode())

    def exists(self) -> bool:
        """Return whether there is a step to go on from, whole or not."""
        return self.latest_name() is not None or bool(self.steps())

    # ---- the end of a save

    def commit(self, folder: Location, options: StepOptions, hold: Callable[[], None]) -> str:
        """Make a complete folder the latest step, and then remove what is no longer wanted.

        Args:
            folder: The folder, with its manifest.
            options: Its step, and which steps up to this one stay. Steps beyond it, of a run that went back, stay.
            hold: Raises `CheckpointError` where another job saves into this root by now.

        Returns:
            The name of the step's folder.
        """
        hold()
        name = self.place(folder, options.step)
        try:
            hold()
        except CheckpointError:
            with contextlib.suppress(Exception):  # the lost lease is what matters
                self.remove(name)
            raise
        self.write_latest(name)
        self._prune(name, options, hold)
        return name

    def _prune(self, kept: str, options: StepOptions, hold: Callable[[], None]) -> None:
        """Remove what is no longer wanted. The new step is safe by now, so a failure is logged and not raised."""
        try:
            stale_files = self._obsolete(kept, options)
        except Exception as error:  # noqa: BLE001 - a storage has errors of its own
            log.warning("Old steps in '%s' could not be listed: %s. The next save tries again.", self, error)
            return
        for name in stale_files:
            try:
                hold()
                self.remove(name)
            except Exception as error:  # noqa: BLE001 - as above
                log_failed_removal(f"{self.root}/{name}", error)

    def _obsolete(self, kept: str, options: StepOptions) -> list[str]:
        """Return other revisions of a step, and steps before it that no rule keeps."""
        step, names = options.step, self._names()
        if not options.has_retention:
            names = [name for name in names if _number(name) == step]
        numbers = {name: _number(name) for name in self._complete(names)}
        upto = {number for number in numbers.values() if number <= step}
        metrics, unknown = dict[int, float](), set[int]()
        if options.keep_best is not None:
            metrics, unknown = self._metrics({number: name for name, number in numbers.items() if number <= step})
        wanted = options.kept(upto, metrics) | unknown
        return [
            name
            for name, number in numbers.items()
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

    # ---- which step to load

    def candidates(self) -> list[str]:
        """Return the steps to try for the newest whole one: the latest, those before it, then those beyond it.

        Raises:
            CheckpointError: If there is none, or it can't be found out.
        """
        latest = self.latest_name()
        limit = parse_step_name(latest) if latest is not None else None
        if latest is not None and limit is not None and self._may_be_complete(latest):
            # Others are asked for their manifests when they are tried: one that can't be read stops no run.
            names = sorted({*self._names(), latest}, key=lambda name: parse_step_name(name) or (0, 0))
        else:
            names = self.steps()
        if latest not in names:
            found = names[::-1]
        else:
            before = [name for name in names if limit is not None and (parse_step_name(name) or limit) <= limit]
            found = [*before[::-1], *(name for name in names[::-1] if name not in before)]
        return found or [self.find(LATEST)]  # which raises

    def _may_be_complete(self, name: str) -> bool:
        """Return whether a step has its manifest, or that can't be found out: whoever tries it says why."""
        try:
            return self.is_complete(name)
        except (CheckpointUnreadableError, StorageUnreachableError):
            return True

    def find(self, step: int | str) -> str:
        """Return the folder of a step.

        Args:
            step: A step, or ``"latest"``. Where the file ``latest`` is missing (a step was copied elsewhere by hand),
                the highest step is the latest.

        Raises:
            CheckpointAbsentError: If there is no such step.
            CheckpointDamagedError: If ``latest`` names none.
        """
        if step == LATEST:
            latest = self.latest_name()
            if latest is not None:
                return self._named(latest)
        names = self.steps()
        found = [name for name in names if step in (LATEST, _number(name))]
        if found:
            return found[-1]
        if not names:
            msg = (
                f"There is no checkpoint in '{self}'. Ask `booster.has_checkpoint(root)` first where a run may "
                "start from nothing."
            )
            raise CheckpointAbsentError(msg)
        listed = ", ".join(str(_number(name)) for name in names[-10:])
        msg = f"There is no step {step} in '{self}'. Steps there: {listed}."
        raise CheckpointAbsentError(msg)

    def _named(self, latest: str) -> str:
        """Return the step that ``latest`` names, if it is one."""
        if parse_step_name(latest) is None:
            msg = f"The file '{LATEST}' in '{self}' is damaged: it names {latest[:100]!r}."
            raise CheckpointDamagedError(msg + self.advice(None))
        if not self.is_complete(latest):
            msg = f"'{self}' names '{latest}' as its latest step, but that is missing or lacks its manifest."
            raise CheckpointDamagedError(msg + self.advice(latest))
        return latest

    def advice(self, unusable: str | None) -> str:
        """Return the sentence that names the newest other step that is whole, and how to load it.

        Reads every byte of steps until one is whole.

        Args:
            unusable: The step that cannot be used; older steps are looked at first.
        """
        try:
            names = [name for name in reversed(self._names()) if name != unusable]
        except CheckpointError:
            return ""
        limit = parse_step_name(unusable) if unusable else None
        older = [name for name in names if limit is None or (parse_step_name(name) or limit) < limit]
        for name in (*older, *(name for name in names if name not in older)):
            try:
                verify_folder(self.folder(name))
            except CheckpointError:
                continue
            kind = "older" if name in older and limit is not None else "other"
            step = _number(name)
            return f" The newest {kind} step that is whole is {step}: load it with `step={step}`."
        return " No other step there is whole."


class _Run(CheckpointRoot, Generic[_Place]):
    root: _Place

    def __init__(self, root: _Place) -> None:
        self.root = root


class LocalRun(_Run[LocalLocation]):
    """Steps in a folder of the file system; what is in the making is hidden by its name."""

    @override
    def prepare_new_folder(self, step: int, hold: Callable[[], None]) -> Location:
        if self.root.size() is not None:
            msg = f"'{self}' is a file, but checkpoints need a folder there. Pass another path."
            raise CheckpointError(msg)
        names = self.root.children()
        if names:
            hold()
        for name in names:
            if _STEPS_IN_THE_MAKING.fullmatch(name) or _TEXTS_IN_THE_MAKING.fullmatch(name):
                _try_to_remove(self.root / name)
        return self.root / temporary_name(step_name(step))

    @override
    def place(self, folder: Location, step: int) -> str:
        # What is there of the same step stays until the new one is in place, and may then fail to be removed.
        name = new_step_name(step, self.root.children())
        _local(folder).path.rename(self.root.path / name)
        sync_folders(self.root.path, self.root.path.resolve().parent)
        return name

    @override
    def remove(self, name: str) -> None:
        hidden = self.root / temporary_name(name)
        (self.root / name).path.rename(hidden.path)
        _try_to_remove(hidden)


class StoredRun(_Run[StoredLocation]):
    """Steps at a URL, where nothing is renamed: a step is written where it stays, and its manifest completes it."""

    @override
    def prepare_new_folder(self, step: int, hold: Callable[[], None]) -> Location:
        if self.root.size() is not None:
            msg = f"'{self}' is a file, but checkpoints need a folder there. Pass another URL."
            raise CheckpointError(msg)
        taken = self.root.children()
        if taken:
            hold()
        names = [name for name in taken if parse_step_name(name)]
        complete = self._complete(names)
        remains = [name for name in names if name not in complete]
        for name in remains:
            _try_to_remove(self.root / name)
        return self.root / new_step_name(step, self.root.children() if remains else names)

    @override
    def place(self, folder: Location, step: int) -> str:
        del step
        return folder.name

    @override
    def remove(self, name: str) -> None:
        (self.root / name / MANIFEST).remove()  # without it, the rest is no step any more
        _try_to_remove(self.root / name)


def _number(name: str) -> int:
    """Return the step that a folder's name tells."""
    parsed = parse_step_name(name)
    assert parsed is not None, "the names of steps alone are asked"
    return parsed[0]


def _try_to_remove(place: Location) -> None:
    """Remove what is no step, as far as possible; log what stops it."""
    try:
        place.remove()
    except Exception as error:  # noqa: BLE001 - a storage has errors of its own
        log_failed_removal(place, error)


def log_failed_removal(where: object, error: Exception) -> None:
    """Log that an old step, or a part of one, is still there."""
    log.warning("'%s' could not be removed: %s. The next save into this folder tries again.", where, error)


# ---- which model a root is of

_last_saved: dict[str, tuple[int, weakref.ref[nn.Module]]] = {}
"""The step that this process saved last into each root, and the model that it was of."""


def check_is_same_model(run: CheckpointRoot, step: int, module: nn.Module | None) -> None:
    """Raise where this process has just saved the same step of another model there, which this would replace."""
    last_step, saved = _last_saved.get(run.root.identity, (None, None))
    if saved is None or step != last_step or module is None or saved() is module:
        return
    gc.collect()  # it may be garbage by now, which is in no hurry to go
    other = saved()
    if other is not None:
        msg = (
            f"Step {step} in '{run}' is that of another model, a `{type(other).__name__}`, which saving this "
            f"`{type(module).__name__}` would replace. Save each model into a folder of its own."
        )
        raise ConfigError(msg)


def remember_model(run: CheckpointRoot, step: int, module: nn.Module) -> None:
    """Note of which model this process has just saved a step."""
    _last_saved[run.root.identity] = step, weakref.ref(module)


def has_saved_into(run: CheckpointRoot) -> bool:
    """Return whether this process has saved into a root, and not loaded from it since."""
    return run.root.identity in _last_saved


def forget_model(run: CheckpointRoot) -> None:
    """Let any model be saved into a root from which one was loaded."""
    _last_saved.pop(run.root.identity, None)
