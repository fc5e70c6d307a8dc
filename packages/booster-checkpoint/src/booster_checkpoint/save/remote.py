"""Saves to URLs: each file is uploaded by its owner while it is written, and appears when all ranks have written.

Nothing is staged: a file's parts leave as its values arrive. Until all of them are at the storage, on all ranks, nobody
sees any of it, so a save that fails leaves what was there.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from booster_checkpoint.files.checksums import BlockHasher, block_sizes
from booster_checkpoint.files.layout import WrittenFile
from booster_checkpoint.save.owners import OwnerWrite, spread_over_hosts
from booster_core.errors import CheckpointError
from booster_core.log import ANY_RANK, log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed import ProcessGroup

    from booster_checkpoint.files.layout import PlannedFile, SavePlan
    from booster_checkpoint.save.async_writer import SnapshotBuffers
    from booster_checkpoint.save.saver import Save, Told
    from booster_checkpoint.save.writer import Fragment
    from booster_checkpoint.session import Session
    from booster_checkpoint.storage import RemotePath, WriteStream

_NUMBERED = re.compile(r"-\d{5,}-of-\d{5,}\.")
_MOST_THREADS = 8


class Uploads:
    """The files at a URL that this rank owns.

    Args:
        folder: Where the files go.
        home: Tells the folder inside of it that a file of a name goes to; ``""`` for itself.

    Attributes:
        requests: Threads for requests that need not wait for each other.
    """

    def __init__(self, folder: RemotePath, home: Callable[[str], str] | None) -> None:
        self.requests = ThreadPoolExecutor(_MOST_THREADS, "checkpoint writer")
        self._folder = folder
        self._home = home
        self._streams: list[WriteStream] = []
        self._layouts: Path | None = None

    def place_of(self, name: str) -> RemotePath:
        """Return where a file goes."""
        inner = self._home(name) if self._home is not None else ""
        return self._folder / inner / name if inner else self._folder / name

    def layout_of(self, file: PlannedFile) -> Path:
        """Return a local path for a file without its values. It has the file's own name, which torch writes inside."""
        if self._layouts is None:
            self._layouts = Path(tempfile.mkdtemp(prefix="booster-"))
        return self._layouts / file.name

    def open(self, name: str, nbytes: int) -> WriteStream:
        """Begin to upload a file, while the end of the one before may still be on its way."""
        stream = self.place_of(name).open_write(nbytes)
        self._streams.append(stream)
        return stream

    def publish(self, texts: Mapping[str, str]) -> None:
        """Make all files visible, and write small ones."""
        closing = [self.requests.submit(stream.close) for stream in self._streams]
        self.write_texts(texts)
        for each in closing:
            each.result()

    def write_texts(self, texts: Mapping[str, str]) -> None:
        """Write small files, several at a time."""
        writing = [self.requests.submit(self.place_of(name).write_bytes, text.encode()) for name, text in texts.items()]
        for each in writing:
            each.result()

    def end(self) -> None:
        """Delete what has been uploaded and not been published."""
        self.requests.shutdown()
        for stream in self._streams:
            try:
                stream.discard()
            except Exception as error:  # noqa: BLE001 - what stopped the save is what matters
                log.warning("%s The next save into this folder tries again.", error, extra=ANY_RANK)
        if self._layouts is not None:
            shutil.rmtree(self._layouts, ignore_errors=True)


def save_at_url(
    session: Session,
    save: Save,
    plan: SavePlan,
    folder: RemotePath,
    fragments: Iterable[Fragment],
    buffers: SnapshotBuffers,
    bucket_bytes: int,
    progress: Callable[[int], None],
) -> list[WrittenFile]:
    """Write the files of a plan, and commit them.

    Args:
        session: The ranks.
        save: The call.
        plan: The plan.
        folder: Its folder.
        fragments: What this rank holds.
        buffers: Memory for fragments that do not stay; released at the end.
        bucket_bytes: Most memory to use besides the fragments and the parts that are being uploaded.
        progress: Told the number of bytes after each write.

    Returns:
        The files, on rank 0; an empty list elsewhere.

    Collective: every rank.
    """
    name, where = save.name, plan.folder
    group = save.group or (session.cpu_group() if session.world_size > 1 else None)
    uploads = Uploads(folder, save.home)
    try:
        present = _look_at_folder(session, name, plan, folder, uploads, save.group)
        with session.together(f"{name} (begin uploads)", where, for_long=True):
            job = OwnerWrite(
                plan,
                fragments if save.keeps_values else buffers.take(fragments),
                spread_over_hosts(session.hosts(save.group), range(session.world_size)),
                rank=session.rank,
                world_size=session.world_size,
                bucket_bytes=bucket_bytes,
                want_checksums=save.want_checksums,
                progress=progress,
                uploads=uploads,
            )
        with session.together(f"{name} (write)", where, for_long=True):
            told = job.run(group)
        told = {key: entry for part in session.gather_to_first(told, save.group) for key, entry in part.items()}
        # One file is replaced at once. Several are not: until the last is in place, a note tells readers so.
        is_replacing = not present.isdisjoint(plan.names) or any(map(plan.obsolete, present))
        marks = plan.marks if is_replacing else ()
        with session.together(f"{name} (publish)", where, for_long=True):
            list(uploads.requests.map(lambda mark: (folder / mark).write_bytes(b""), marks))
        with session.together(f"{name} (publish)", where, for_long=True):
            early = {key: text for key, text in plan.texts.items() if key not in plan.last}
            uploads.publish(early if session.rank == 0 else {})
        written: list[WrittenFile] = []
        with session.together(f"{name} (commit)", where, for_long=True):
            if session.rank == 0:
                written = _commit(plan, folder, uploads, told, present, marks)
                if save.commit is not None:
                    save.commit(written)
        return written
    finally:
        uploads.end()
        if not save.keeps_values:
            buffers.release()


def _look_at_folder(
    session: Session, name: str, plan: SavePlan, folder: RemotePath, uploads: Uploads, group: ProcessGroup | None
) -> set[str]:
    """Return, on rank 0, what `_present` does, once it is known that all ranks see what rank 0 writes there.

    Each storage is tried once.

    Raises:
        CheckpointError: If a rank does not see it: ``memory://`` is each process' own.
    """
    storage = "/".join(folder.url.split("/")[:3])
    is_known = session.world_size == 1 or storage in session.shared_storages
    probe = folder / f".booster-{plan.token}.probe"
    present: set[str] = set()
    with session.together(f"{name} (look at the folder)", folder, for_long=True):
        if session.rank == 0:
            writing = None if is_known else uploads.requests.submit(probe.write_bytes, b"")
            present = _present(plan, folder)
            if writing is not None:
                writing.result()
    if is_known:
        return present
    seen = session.gather(name, folder, lambda: probe.alone().is_file(), group)
    if session.rank == 0:
        uploads.requests.submit(_remove_probe, probe)
    if not all(seen):
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        msg = (
            f"Ranks {blind[:10]} do not see what rank 0 wrote to '{folder}'. A storage of one process or host cannot "
            "serve others: save to one that all ranks reach."
        )
        raise CheckpointError(msg)
    session.shared_storages.add(storage)
    return present - {probe.name}


def _remove_probe(probe: RemotePath) -> None:
    with contextlib.suppress(CheckpointError):
        probe.remove()


def _present(plan: SavePlan, folder: RemotePath) -> set[str]:
    """Return the names of files that the save replaces, or that say that an earlier one was interrupted."""
    if plan.marks:
        return {key for key in folder.files() if "/" not in key}
    # Next to one file there may be everything else that the bucket holds.
    asked = {*plan.names, *plan.healed, *plan.healed.values()}
    return {name for name in asked if (folder / name).alone().is_file()}


def _commit(
    plan: SavePlan, folder: RemotePath, uploads: Uploads, told: Told, present: set[str], marks: Iterable[str]
) -> list[WrittenFile]:
    """Write the small files, those that make the others valid last, and remove what is replaced; on rank 0."""
    folder.forget()
    for file in plan.files:
        place = uploads.place_of(file.name)
        place = place if plan.marks else place.alone()
        nbytes = place.stat().st_size if place.is_file() else None
        if nbytes != told[file.name][0]:
            seen = "does not exist" if nbytes is None else f"has {nbytes} bytes"
            msg = f"'{place}' {seen} after {told[file.name][0]} bytes have been written to it."
            raise CheckpointError(msg)
    for name, text in plan.texts.items():
        content = text.encode()
        hasher = BlockHasher(block_sizes([len(content)]))
        hasher.update(content)
        told[name] = len(content), tuple(hasher.blocks)
    uploads.write_texts({name: plan.texts[name] for name in plan.last})
    tensors = {file.name: tuple(spec.key for spec in file.specs) for file in plan.files}
    written = [
        WrittenFile(name=name, nbytes=told[name][0], blocks=told[name][1], tensors=tensors.get(name, ()))
        for name in plan.names
    ]
    obsolete = list(filter(plan.obsolete, present))
    healed = {mark: index for mark, index in plan.healed.items() if mark in present}
    gone = [*obsolete, *(index for index in healed.values() if index not in plan.last and index in present)]
    # Without its index or its only file, an older form is not looked for: its numbered files go afterwards.
    numbered = {name for name in gone if _NUMBERED.search(name)}
    for names in (set(gone) - numbered, numbered, {*marks, *healed}):
        list(uploads.requests.map(lambda name: (folder / name).remove(), names))
    return written
