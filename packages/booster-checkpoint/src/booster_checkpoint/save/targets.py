"""Where the files of a save go, and how they appear there: announced, revealed, settled.

Nothing of a save is visible before `Target.reveal`. One file is replaced at once; several are not, so a mark says until
the last is in place that they are being replaced (`announce`), and goes when what they replace has gone (`settle`). The
folder of a new step is not looked at by anybody yet: its files have their own names from the start. Each of the three
ends on all ranks before the next begins.
"""

from __future__ import annotations

import re
import shutil
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from typing_extensions import override

from booster_checkpoint.save.in_place import LocalStream, create_file
from booster_checkpoint.storage import LocalLocation, StoredLocation, locate
from booster_checkpoint.storage.location import sync_folders, temporary_name, temporary_pattern
from booster_core.errors import CheckpointError
from booster_core.log import ANY_RANK, log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from booster_checkpoint.save.owners import FileStream
    from booster_checkpoint.save.plan import SavePlan, Sums, WriteJob
    from booster_checkpoint.storage import Location, WriteStream

_NUMBERED = re.compile(r"-\d{5,}-of-\d{5,}\.")
_MOST_THREADS = 8


def target_at(folder: Location | Path, *, is_fresh: bool = False, check: Callable[[], None] | None = None) -> Target:
    """Return the target of a folder, for one save.

    Args:
        folder: The folder; made if it does not exist.
        check: Raises, on rank 0, what stands in the way of a save there.
        is_fresh: Nobody looks at the folder before the save is committed, and nothing is in it: a new step's.
    """
    place = locate(folder)
    if isinstance(place, StoredLocation):
        return StoreTarget(place, is_fresh=is_fresh, check=check)
    assert isinstance(place, LocalLocation), "there are two kinds"
    return FolderTarget(place.path, is_fresh=is_fresh, check=check)


class Target(ABC):
    """The folder that a save writes to. A failed save calls `discard` on every rank.

    Args:
        path: The folder, as messages name it.
        is_fresh: Nobody looks at it before the save is committed, and nothing is in it.
        check: Raises, on rank 0, what stands in the way of a save there.

    Attributes:
        reveals_on_all: Every rank calls `reveal`, and not rank 0 alone.
    """

    reveals_on_all: bool

    def __init__(
        self, path: Path | Location, *, is_fresh: bool = False, check: Callable[[], None] | None = None
    ) -> None:
        self.path = path
        self.check = check
        self._is_fresh = is_fresh

    @abstractmethod
    def prepare(self, plan: SavePlan, *, creates_files: bool) -> None:
        """Make the folder and lay out what rank 0 writes; called there.

        Args:
            plan: The plan.
            creates_files: Create the files of tensors, with room for their values.
        """

    @abstractmethod
    def ranks_that_see(self, job: WriteJob) -> list[int]:
        """Return the ranks that see what rank 0 writes to the folder.

        Raises:
            CheckpointError: If some don't, and nobody can write for them.

        Collective: every rank, once it is prepared.
        """

    @abstractmethod
    def open(self, plan: SavePlan, name: str, nbytes: int) -> FileStream:
        """Open a file of tensors for its owner, who writes it from front to back."""

    @abstractmethod
    def announce(self, plan: SavePlan, sums: Sums) -> None:
        """Leave the marks that several files are being replaced; on rank 0."""

    @abstractmethod
    def reveal(self, plan: SavePlan, sums: Sums) -> None:
        """Give files their names."""

    @abstractmethod
    def settle(self, plan: SavePlan, sums: Sums) -> None:
        """Remove what is replaced, and then the marks; on rank 0."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what this rank has written and nobody has seen; raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads and files; after `discard` where that is called."""


class FolderTarget(Target):
    """A folder of a file system. Files have temporary names until rank 0 renames them; those of a fresh one their own.

    Args:
        path: The folder.
        is_fresh: See `Target`.
        check: See `Target`.
    """

    reveals_on_all = False
    path: Path

    def __init__(self, path: Path, *, is_fresh: bool = False, check: Callable[[], None] | None = None) -> None:
        super().__init__(path, is_fresh=is_fresh, check=check)
        self._made: list[Path] = []
        self._texts: list[LocalStream] = []
        self._plan: SavePlan | None = None
        self._marks: tuple[str, ...] = ()
        self._present: set[str] = set()

    def written(self, plan: SavePlan, name: str) -> Path:
        """Return the path under which a file is written."""
        return self.path / (name if self._is_fresh else temporary_name(name, plan.token))

    @override
    def prepare(self, plan: SavePlan, *, creates_files: bool) -> None:
        self._plan = plan
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in plan.folders:
            if folder:
                (self.path / folder).mkdir(exist_ok=True)
        if not self._is_fresh:
            self._clear(plan)
        for file in plan.files if creates_files else ():
            create_file(self.written(plan, file.name), file.frame())
        for name, text in plan.texts.items():
            self._texts.append(LocalStream(self.written(plan, name)))
            self._texts[-1].write(memoryview(text.encode()))
            self._texts[-1].begin()

    def _clear(self, plan: SavePlan) -> None:
        """Remove what a killed save of the same checkpoint has left."""
        names, pattern = set(plan.names), temporary_pattern(".+")
        for path in self.path.iterdir():
            match = pattern.fullmatch(path.name)
            if match and (match[1] in names or plan.is_stale(match[1])):
                path.unlink(missing_ok=True)

    @override
    def ranks_that_see(self, job: WriteJob) -> list[int]:
        return job.session.ranks_that_see(self.path, job.plan.token, job.group)

    @override
    def open(self, plan: SavePlan, name: str, nbytes: int) -> FileStream:
        return LocalStream(self.written(plan, name))

    @override
    def announce(self, plan: SavePlan, sums: Sums) -> None:
        with ThreadPoolExecutor(_MOST_THREADS, "checkpoint sync") as pool:  # at once: the disk takes as long as for one
            list(pool.map(LocalStream.finish, self._texts))
        for name in plan.names:
            path = self.written(plan, name)
            nbytes = path.stat().st_size if path.exists() else None
            if nbytes != sums[name][0]:
                seen = "does not exist" if nbytes is None else f"has {nbytes} bytes"
                msg = (
                    f"'{self.path / name}' {seen} on rank 0's host after {sums[name][0]} bytes have been written to "
                    "it: the hosts do not see the same files. Save to a folder that all of them share."
                )
                raise CheckpointError(msg)
        if self._is_fresh:
            return
        self._present = {entry.name for entry in self.path.iterdir()}
        is_replacing = any(map(plan.is_stale, self._present)) or not self._present.isdisjoint(plan.names)
        self._marks = plan.marks if is_replacing else ()
        for mark in self._marks:
            (self.path / mark).touch()
        if self._marks:
            sync_folders(self.path)

    @override
    def reveal(self, plan: SavePlan, sums: Sums) -> None:
        for name in () if self._is_fresh else plan.names:
            self.written(plan, name).replace(self.path / name)

    @override
    def settle(self, plan: SavePlan, sums: Sums) -> None:
        marks, gone = _replaced(plan, self._present, self._marks)
        for name in gone:
            (self.path / name).unlink(missing_ok=True)
        sync_folders(self.path, *(self.path / folder for folder in plan.folders if folder))
        if marks:
            for mark in marks:
                (self.path / mark).unlink(missing_ok=True)
            sync_folders(self.path)

    @override
    def discard(self) -> None:
        if self._plan is None:
            return
        if self._is_fresh:
            shutil.rmtree(self.path, ignore_errors=True)
        for name in self._plan.names:
            with suppress(OSError):
                self.written(self._plan, name).unlink(missing_ok=True)
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    @override
    def close(self) -> None:
        for text in self._texts:
            text.abandon()


class UploadStream:
    """A file as its owner writes it; its target waits for its end and makes it visible.

    Args:
        upload: The storage's stream.
    """

    def __init__(self, upload: WriteStream) -> None:
        self.write = upload.write

    def finish(self) -> None:
        """Return at once: the end of the file travels while the next file is written."""

    def abandon(self) -> None:
        """Return at once: what is not made visible is deleted by `StoreTarget.discard`."""


class StoreTarget(Target):
    """A folder at a URL. Each file is uploaded by its owner while it is written, and appears when all have written.

    Nothing is staged. Until all of it is at the storage, on all ranks, nobody sees any of it, so a save that fails
    leaves what was there.

    Args:
        folder: The folder.
        is_fresh: See `Target`.
        check: See `Target`.
    """

    reveals_on_all = True

    def __init__(
        self, folder: StoredLocation, *, is_fresh: bool = False, check: Callable[[], None] | None = None
    ) -> None:
        super().__init__(folder, is_fresh=is_fresh, check=check)
        self._folder = folder
        self._requests = ThreadPoolExecutor(_MOST_THREADS, "checkpoint writer")
        self._streams: list[WriteStream] = []
        self._early: Mapping[str, str] = {}
        self._marks: tuple[str, ...] = ()
        self._present: set[str] = set()

    @override
    def prepare(self, plan: SavePlan, *, creates_files: bool) -> None:
        self._early = {name: text for name, text in plan.texts.items() if name not in plan.last}
        if not self._is_fresh:
            self._present = self._look(plan)

    def _look(self, plan: SavePlan) -> set[str]:
        """Return the names of files that the save replaces, or that say that an earlier one was interrupted."""
        if plan.marks:
            return {name for name, size in self._folder.children().items() if size is not None}
        # Next to one file there may be everything else that the bucket holds.
        asked = [*{*plan.names, *plan.repaired, *plan.repaired.values()}]
        return {name for name, size in zip(asked, self._folder.sizes(asked), strict=True) if size is not None}

    @override
    def ranks_that_see(self, job: WriteJob) -> list[int]:
        session, storage = job.session, "/".join(self._folder.url.split("/")[:3])
        if session.world_size > 1 and storage not in session.shared_storages:  # each is tried once
            probe = self._folder / f".booster-{job.plan.token}.probe"
            with session.together(job.call, self.path):
                if session.rank == 0:
                    probe.write_bytes(b"")
            seen = session.gather(job.call, self.path, lambda: probe.size() is not None, job.group)
            if session.rank == 0:
                self._requests.submit(probe.remove)
            blind = [rank for rank, sees in enumerate(seen) if not sees]
            if blind:
                msg = (
                    f"Ranks {blind[:10]} do not see what rank 0 wrote to '{self.path}'. A storage of one process or "
                    "host cannot serve others: save to one that all ranks reach."
                )
                raise CheckpointError(msg)
            session.shared_storages.add(storage)
        return list(range(session.world_size))

    @override
    def open(self, plan: SavePlan, name: str, nbytes: int) -> FileStream:
        """Begin to upload a file, while the end of the one before may still be on its way."""
        stream = (self._folder / name).open_write(nbytes)
        self._streams.append(stream)
        return UploadStream(stream)

    @override
    def announce(self, plan: SavePlan, sums: Sums) -> None:
        is_replacing = not self._present.isdisjoint(plan.names) or any(map(plan.is_stale, self._present))
        self._marks = plan.marks if is_replacing else ()
        self._write(dict.fromkeys(self._marks, ""))

    @override
    def reveal(self, plan: SavePlan, sums: Sums) -> None:
        try:
            closing = [self._requests.submit(stream.close) for stream in self._streams]
            self._write(self._early)
            for each in closing:
                each.result()
        except CheckpointError as error:
            if self._is_fresh or not plan.marks:
                raise
            msg = (
                f"{error} Other files in '{self.path}' may have been replaced already: where there were any, they "
                "count as interrupted until a save into it succeeds."
            )
            raise type(error)(msg) from error

    @override
    def settle(self, plan: SavePlan, sums: Sums) -> None:
        self._check_sizes(plan, sums)
        self._write({name: plan.texts[name] for name in plan.last})
        marks, gone = _replaced(plan, self._present, self._marks)
        numbered = {name for name in gone if _NUMBERED.search(name)}
        for names in ([name for name in gone if name not in numbered], numbered, marks):
            list(self._requests.map(lambda name: (self._folder / name).remove(), names))

    def _check_sizes(self, plan: SavePlan, sums: Sums) -> None:
        names = [file.name for file in plan.files]
        if plan.marks:
            listed = dict(zip(plan.folders, self._requests.map(self._children, plan.folders), strict=True))
            sizes = [listed[folder].get(name) for folder, _, name in (each.rpartition("/") for each in names)]
        else:
            sizes = self._folder.sizes(names)
        for name, nbytes in zip(names, sizes, strict=True):
            if nbytes != sums[name][0]:
                seen = "does not exist" if nbytes is None else f"has {nbytes} bytes"
                msg = f"'{self._folder / name}' {seen} after {sums[name][0]} bytes have been written to it."
                raise CheckpointError(msg)

    def _children(self, folder: str) -> Mapping[str, int | None]:
        return (self._folder / folder if folder else self._folder).children()

    def _write(self, texts: Mapping[str, str]) -> None:
        """Write small files, several at a time."""
        writing = [
            self._requests.submit((self._folder / name).write_bytes, text.encode()) for name, text in texts.items()
        ]
        for each in writing:
            each.result()

    @override
    def discard(self) -> None:
        for stream in self._streams:
            try:
                stream.discard()
            except Exception as error:  # noqa: BLE001 - what stopped the save is what matters
                log.warning("%s The next save into this folder tries again.", error, extra=ANY_RANK)

    @override
    def close(self) -> None:
        self._requests.shutdown()


def _replaced(plan: SavePlan, present: set[str], marks: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the marks that go at the end of a save, and the files that it removes, in their order.

    Marks of interrupted saves that this one replaces go too, and the indexes of files of two saves. Without its index
    or its only file, an older form is not looked for: its numbered files go afterwards.

    Args:
        plan: The plan.
        present: The files of the folder before the save.
        marks: Those that this save has left.
    """
    repaired = {mark: index for mark, index in plan.repaired.items() if mark in present}
    gone = {*filter(plan.is_stale, present), *(set(repaired.values()) & present)} - set(plan.last)
    return sorted({*marks, *repaired}), sorted(gone, key=lambda name: (bool(_NUMBERED.search(name)), name))
