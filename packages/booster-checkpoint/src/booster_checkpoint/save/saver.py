"""How a save goes: what ranks tell each other, who writes, and when files get their names; now or in the background.

Files are laid out under temporary names, every rank writes its bytes and syncs them, all agree that they have, and only
then rank 0 renames the files and commits what they belong to (the order of torchsnapshot). Once the plan is made,
ranks agree over the store alone.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.checksums import Block, block_sizes, blocks_of_file
from booster_checkpoint.save.async_writer import BackgroundWriter, SnapshotBuffers
from booster_checkpoint.save.plan import WrittenFile, make_plan
from booster_checkpoint.save.specs import OwnedTensors, SpecTables
from booster_checkpoint.save.writer import (
    Fragment,
    LocalStream,
    create_file,
    sync_files,
    sync_folder,
    write_directly,
    write_text,
)
from booster_checkpoint.session import Progress
from booster_checkpoint.storage import RemotePath
from booster_checkpoint.storage.temporary import TEMPORARY, TOKEN_CHARACTERS, new_token
from booster_core.errors import CheckpointError
from booster_core.ranks import current_world
from booster_core.state import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from booster_checkpoint.save.parts import Part
    from booster_checkpoint.save.plan import PlannedFile, SavePlan
    from booster_checkpoint.session import Session
    from booster_core.state import TensorShard

BUCKET_BYTES = 64 << 20
"""What a save or load takes on a rank besides the state, unless it is told otherwise."""
_NUMBERED = re.compile(r"-\d{5,}-of-\d{5,}\.")
_TEMPORARY_NAME = re.compile(rf"\.(.+)\.[0-9a-f]{{{TOKEN_CHARACTERS}}}{re.escape(TEMPORARY)}")
Told = dict[str, tuple[int, tuple[Block, ...]]]
"""What the writers of files say of them, by name: size, and blocks where checksums were asked for."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """One call; see `Saver.save`.

    Args:
        facts: Returns, for each part, what this rank tells the others, and the tensors that it owns parts of.
        fragments: Returns what this rank writes; a fragment is read before the next one is asked for.
        keeps_values: Fragments may be read later as well.
        is_shown: Whether a progress bar may be shown.
        home: See `Saver.save`.
        group: The group that a save in the background communicates in.
    """

    name: str
    folder: Path
    parts: Sequence[Part]
    texts: dict[str, str]
    want_checksums: bool
    commit: Callable[[list[WrittenFile]], None] | None
    facts: Callable[[], list[tuple[list[Any], OwnedTensors]]]
    fragments: Callable[[], Iterable[Fragment]]
    keeps_values: bool
    is_shown: bool
    home: Callable[[str], str] | None = None
    group: ProcessGroup | None = None


class Saver:
    """Writes parts of distributed state.

    Args:
        session: The ranks that save together.
        bucket_bytes: Most memory that a save takes besides the state, in bytes.
        shared_filesystem: Whether all ranks see the same files; found out when ``None``.

    Attributes:
        background: The save that goes on in the background, if any.
        buffers: The memory of its snapshot.
    """

    def __init__(self, session: Session, bucket_bytes: int, *, shared_filesystem: bool | None) -> None:
        self._session = session
        self._bucket_bytes = bucket_bytes
        self._shared_filesystem = shared_filesystem
        self._tables = SpecTables(session)
        self.background = BackgroundWriter()
        self.buffers = SnapshotBuffers(bucket_bytes)

    def begin(self, name: str, check: Callable[[], None] | None = None) -> None:
        """Meet all ranks, when the save before has ended.

        Args:
            name: What the user called; appears in messages.
            check: Raises, on rank 0, where the folder can't be written to.

        Collective: every rank.
        """
        error = self.background.join() if self.background.is_started else None
        if error is None and check is not None and self._session.rank == 0:
            try:
                check()
            except (CheckpointError, OSError) as found:
                error = found
        self._session.begin(name, error)

    def write(
        self,
        name: str,
        folder: Path,
        parts: Sequence[Part],
        *,
        texts: Mapping[str, str] | None = None,
        use_async: bool = False,
        want_checksums: bool = False,
        commit: Callable[[list[WrittenFile]], None] | None = None,
        home: Callable[[str], str] | None = None,
    ) -> list[WrittenFile]:
        """Write parts and further files into a folder, and commit them together, after `begin`.

        The folder itself is not renamed; ``commit`` may do that. Files have their own names when it runs,
        synced, after every rank has written. If anything fails, on any rank, ``commit`` has not been called.

        Args:
            name: What the user called; appears in messages.
            folder: Where the files go; made if it does not exist.
            parts: Models and optimizers.
            texts: Further files and their content; those of all ranks are written, the lowest rank's of equal names.
            use_async: Copy all values, return, and do the rest in the background, ``commit`` too.
            want_checksums: Tell each file's blocks and their checksums in the list.
            commit: Called on rank 0 with the list of files; with ``use_async`` in a thread, where it must not use
                process groups.
            home: At a URL, where nothing can be moved, tells the folder inside of ``folder`` that a file goes to.

        Returns:
            The files, on rank 0; an empty list elsewhere, and with ``use_async``.

        Raises:
            CheckpointError: If anything failed on any rank.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        held = _HeldParts(parts)
        job = Save(
            name=name,
            folder=folder,
            parts=parts,
            texts=dict(texts or {}),
            want_checksums=want_checksums,
            commit=commit,
            facts=held.facts,
            fragments=held.fragments,
            keeps_values=all(part.keeps_values for part in parts),
            is_shown=self._session.rank == 0,
            home=home,
        )
        if use_async:
            self._start(job)
            return []
        return self._run(job)

    def _start(self, save: Save) -> None:
        """Copy all values and go on in the background.

        From here on, whatever goes wrong is told to the other ranks in the background: this rank is through when its
        values are copied. The background has a process group of its own.
        """
        session = self._session
        facts, fragments, failure = None, list[Fragment](), None
        try:
            facts = save.facts()
            fragments = self.buffers.take(save.fragments())
        except Exception as caught:  # noqa: BLE001 - raised in the background, on every rank
            failure = caught

        def known_facts() -> Any:
            if failure is not None:
                raise failure
            return facts

        job = replace(
            save,
            facts=known_facts,
            fragments=lambda: fragments,
            keeps_values=True,
            is_shown=False,
            group=session.cpu_group() if session.world_size > 1 else None,
        )
        number = next(current_world().jobs)

        def run() -> None:
            try:
                self._run(job)
            finally:
                session.linger(f"checkpoint/{number}/left")

        session.before_close(self.background.settle)
        self.background.start(save.name, run)

    def _run(self, save: Save) -> list[WrittenFile]:
        """Plan a save with all ranks, write, and commit."""
        session, name, folder = self._session, save.name, save.folder
        made: list[Path] = []
        plan: SavePlan | None = None
        try:
            plan = self._plan(save, made)
            elsewhere = plan.elsewhere
            fragments = (each for each in save.fragments() if each.key not in elsewhere[each.part])
            told: Told = {}
            with Progress("Saving", plan.total_bytes // session.world_size, is_shown=save.is_shown) as progress:
                if isinstance(folder, RemotePath):
                    from booster_checkpoint.save.remote import save_at_url

                    bucket = self._bucket_bytes
                    return save_at_url(session, save, plan, folder, fragments, self.buffers, bucket, progress.advance)
                if self._shared_filesystem is False or len(set(session.hosts(save.group))) > 1:
                    told = self._write_by_owners(save, plan, fragments, progress.advance)
                else:
                    with session.together(f"{name} (create files)", folder, for_long=True):
                        if session.rank == 0:
                            _create(plan, plan.files)
                    with session.together(f"{name} (write)", folder, for_long=True):
                        paths = write_directly(plan, fragments, self._bucket_bytes, progress.advance)
                    told = self._sync(save, plan, paths)
            written: list[WrittenFile] = []
            with session.together(f"{name} (commit)", folder, for_long=True):
                if session.rank == 0:
                    written = _written(plan, told)
                    _rename(plan)
                    if save.commit is not None:
                        save.commit(written)
        except BaseException:
            if session.rank == 0 and not isinstance(folder, RemotePath):
                _undo(plan, made)
            raise
        return written

    def _plan(self, save: Save, made: list[Path]) -> SavePlan:
        """Make the folder, tell all ranks what each writes, and compute the same layout on each.

        Args:
            save: The call.
            made: Filled, on rank 0, with the folders that were made.
        """
        session, folder = self._session, save.folder
        told, owned = list[list[Any]](), list[OwnedTensors]()

        def tell() -> list[Any]:
            if session.rank == 0 and not isinstance(folder, RemotePath):
                made.extend(path for path in (folder, *folder.parents) if not path.exists())
                folder.mkdir(parents=True, exist_ok=True)
            for part, (facts, held) in zip(save.parts, save.facts(), strict=True):
                told.append([self._tables.tell(part, held), *facts])
                owned.append(held)
            return [*itertools.chain(*told), save.texts, new_token() if session.rank == 0 else None]

        gathered = session.gather_each(save.name, folder, tell, save.group)
        # What follows is computed from the same values on every rank, and so raises on all of them or on none.
        texts: dict[str, str] = {}
        for rank_texts in distinct(entries[-2] for entries in gathered):
            texts = rank_texts | texts  # the lowest rank's of equal names
        specs = []
        ends = list(itertools.accumulate(map(len, told), initial=0))
        for part, held, (begin, end) in zip(save.parts, owned, itertools.pairwise(ends), strict=True):
            part.learn([entries[begin + 1 : end] for entries in gathered], session.rank)
            specs.append(self._tables.merge(part, held, [entries[begin] for entries in gathered], save.group))
        return make_plan(folder, gathered[0][-1], save.parts, specs, texts)

    def _sync(self, save: Save, plan: SavePlan, paths: Sequence[Path]) -> Told:
        """Wait until files are on disk; meanwhile compute their checksums, if they are wanted, for rank 0."""
        session, told = self._session, Told()
        with (
            session.together(f"{save.name} (sync)", save.folder, for_long=True),
            ThreadPoolExecutor(1, "checkpoint sync") as pool,
        ):
            syncing = pool.submit(sync_files, paths)
            if save.want_checksums:
                told = self._read_checksums(plan)
            syncing.result()
        return _merged(session.gather_to_first(told, save.group)) if save.want_checksums else told

    def _read_checksums(self, plan: SavePlan) -> Told:
        """Return sizes and blocks of this rank's share of all files, read back from the page cache."""
        session, told = self._session, Told()
        if session.rank == 0:
            told = {name: _size_and_blocks(plan.temporary(name)) for name in plan.texts}
        paths = [plan.temporary(file.name) for file in plan.files]
        nbytes = [path.stat().st_size for path in paths]
        shares = [sum(nbytes) * rank // session.world_size for rank in (session.rank, session.rank + 1)]
        begin = 0  # of a block, among the bytes of all files
        for file, path, size in zip(plan.files, paths, nbytes, strict=True):
            mine, first = list[int](), begin
            for block in file.block_sizes(size):
                if shares[0] <= begin < shares[1]:
                    first = begin if not mine else first
                    mine.append(block)
                begin += block
            told[file.name] = size, tuple(blocks_of_file(path, mine, first - (begin - size)))
        return told

    def _write_by_owners(
        self, save: Save, plan: SavePlan, fragments: Iterable[Fragment], advance: Callable[[int], None]
    ) -> Told:
        """Let one rank write each file; return, on rank 0, what all say of theirs."""
        from booster_checkpoint.save.owners import OwnerWrite, choose_owners

        session, told = self._session, Told()
        group = save.group or (session.cpu_group() if session.world_size > 1 else None)
        owners = choose_owners(
            session, save.folder, plan.token, shared_filesystem=self._shared_filesystem, group=save.group
        )
        try:
            with session.together(f"{save.name} (create files)", save.folder, for_long=True):
                if session.rank == 0:
                    _create(plan, ())
                    told = {name: _size_and_blocks(plan.temporary(name)) for name in plan.texts}
                job = OwnerWrite(
                    plan,
                    fragments if save.keeps_values else self.buffers.take(fragments),
                    owners,
                    rank=session.rank,
                    world_size=session.world_size,
                    bucket_bytes=self._bucket_bytes,
                    want_checksums=save.want_checksums,
                    progress=advance,
                    open_file=lambda name, _nbytes: LocalStream(plan.temporary(name)),
                )
            with session.together(f"{save.name} (write)", save.folder, for_long=True):
                told |= job.run(group)
        finally:
            if not save.keeps_values:
                self.buffers.release()
        return _merged(session.gather_to_first(told, save.group))


def _merged(gathered: Sequence[Told]) -> Told:
    """Return what all ranks say; of a file's blocks, each rank has some that follow those of the rank before."""
    merged: Told = {}
    for told in gathered:
        for name, (nbytes, blocks) in told.items():
            merged[name] = nbytes, (*merged.get(name, (0, ()))[1], *blocks)
    return merged


def _size_and_blocks(path: Path) -> tuple[int, tuple[Block, ...]]:
    nbytes = path.stat().st_size
    return nbytes, tuple(blocks_of_file(path, block_sizes([nbytes])))


class _HeldParts:
    """What this rank holds of the parts of a save.

    Shards whose values stay where they are, are listed once: a model of thousands of tensors takes as long to list as
    hundreds of megabytes to copy.

    Args:
        parts: Models and optimizers.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._listed: dict[int, list[TensorShard]] = {}

    def facts(self) -> list[tuple[list[Any], OwnedTensors]]:
        """Return, for each part, what this rank tells the others, and the tensors that it owns parts of."""
        facts = []
        for index, part in enumerate(self._parts):
            told = part.local_facts()
            if part.keeps_values:
                self._listed[index] = list(part.owned_shards())
            facts.append((told, OwnedTensors.of(part, self._owned(index))))
        return facts

    def fragments(self) -> Iterator[Fragment]:
        """Yield what this rank writes; a fragment is read before the next one is asked for."""
        for index, part in enumerate(self._parts):
            for shard in itertools.chain(self._owned(index), part.extra_shards()):
                if shard.numel:
                    yield Fragment(
                        part=index,
                        key=shard.key,
                        shape=shard.global_shape,
                        dtype=part.file_dtype(shard),
                        box=shard.box,
                        flat=shard.flat_range,
                        data=shard.data.detach(),
                    )

    def _owned(self, index: int) -> Iterable[TensorShard]:
        return self._listed[index] if index in self._listed else self._parts[index].owned_shards()


def _create(plan: SavePlan, files: Iterable[PlannedFile]) -> None:
    """Remove what a killed save of the same checkpoint has left, and lay out files; all on rank 0."""
    names = set(plan.names)
    for path in plan.folder.iterdir():
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match and (match[1] in names or plan.obsolete(match[1])):
            path.unlink(missing_ok=True)
    for file in files:
        create_file(plan.temporary(file.name), file.frame())
    for name, text in plan.texts.items():
        write_text(plan.temporary(name), text)


def _written(plan: SavePlan, told: Told) -> list[WrittenFile]:
    """Return the files as rank 0 sees them.

    Raises:
        CheckpointError: If that is not what their writers say.
    """
    tensors = {file.name: tuple(spec.key for spec in file.specs) for file in plan.files}
    written = []
    for name in plan.names:
        path = plan.temporary(name)
        nbytes = path.stat().st_size if path.exists() else -1
        size, blocks = told.get(name, (nbytes, ()))
        if size != nbytes or nbytes < 0:
            seen = f"has {nbytes} bytes" if nbytes >= 0 else "does not exist"
            msg = (
                f"'{plan.folder / name}' {seen} on rank 0's host after another rank has written {size}: the hosts do "
                "not see the same files. Save to a folder that all of them share."
            )
            raise CheckpointError(msg)
        written.append(WrittenFile(name=name, nbytes=nbytes, blocks=blocks, tensors=tensors.get(name, ())))
    return written


def _rename(plan: SavePlan) -> None:
    """Give the files their names, those that make them valid last, and remove what they replace; on rank 0."""
    folder = plan.folder
    present = {entry.name for entry in folder.iterdir()}
    # Without its index or its only file, an older form is not looked for: its numbered files go afterwards.
    obsolete = sorted(filter(plan.obsolete, present), key=lambda name: (bool(_NUMBERED.search(name)), name))
    # One file is replaced at once. Several are not: until the last is in place, a note tells readers so.
    marks = plan.marks if obsolete or not present.isdisjoint(plan.names) else ()
    for mark in marks:
        (folder / mark).touch()
    if marks:
        sync_folder(folder)
    for name in plan.names:
        plan.temporary(name).replace(folder / name)
    for name in obsolete:
        (folder / name).unlink(missing_ok=True)
    # Marks of interrupted saves that this one replaces go too, and the indexes of files of two saves.
    healed = {mark: index for mark, index in plan.healed.items() if mark in present}
    for index in healed.values():
        if index not in plan.last:
            (folder / index).unlink(missing_ok=True)
    if marks or healed:
        sync_folder(folder)
    for mark in {*marks, *healed}:
        (folder / mark).unlink(missing_ok=True)
    sync_folder(folder)


def _undo(plan: SavePlan | None, made: Sequence[Path]) -> None:
    """Remove what a save has left that failed; on rank 0."""
    temporary = [] if plan is None else [plan.temporary(name) for name in plan.names]
    for path in temporary:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()
