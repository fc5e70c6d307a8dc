"""How a save goes: what ranks tell each other, who writes, and when files appear; now or in the background.

A save is a plan, which all ranks compute alike, and fragments of tensors, which each rank has. There are two ways to
write: in place, where all ranks run on one host, and by owners. All agree that everything is written before a target
shows any of it, and only then what the files belong to is committed (the order of torchsnapshot). Once the plan is
made, ranks agree over the store alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.checksums import BlockHasher, block_sizes
from booster_checkpoint.save.background import BackgroundWriter
from booster_checkpoint.save.fragments import Fragment, SnapshotBuffers
from booster_checkpoint.save.in_place import write_in_place
from booster_checkpoint.save.owners import write_by_owners
from booster_checkpoint.save.plan import OwnedTensors, SpecTables, Sums, WriteJob, WrittenFile, make_plan
from booster_checkpoint.save.targets import FolderTarget
from booster_checkpoint.session import timed
from booster_checkpoint.storage.location import new_token
from booster_core.errors import CheckpointError
from booster_core.ranks import current_world
from booster_core.state import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from booster_checkpoint.files.checksums import Block
    from booster_checkpoint.save.parts import MergedPart, Part
    from booster_checkpoint.save.plan import SavePlan
    from booster_checkpoint.save.targets import Target
    from booster_checkpoint.session import Session
    from booster_core.state import TensorShard

BUCKET_BYTES = 64 << 20
"""What a save or load takes on a rank besides the state, unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    """One call; see `Saver.save`.

    Args:
        values: What this rank writes.
        group: The group that a save in the background communicates in.
    """

    call: str
    target: Target
    parts: Sequence[Part]
    values: _OwnedValues | _CopiedValues
    texts: Mapping[str, str]
    checksums: bool
    commit: Callable[[list[WrittenFile]], None] | None
    group: ProcessGroup | None = None


class Saver:
    """Writes parts of distributed state.

    Args:
        session: The ranks that save together.
        bucket_bytes: Most memory that a save takes besides the state, in bytes.

    Attributes:
        background: The save that goes on in the background, if any.
        buffers: The memory of its snapshot.
    """

    def __init__(self, session: Session, bucket_bytes: int) -> None:
        self.session = session
        self._bucket_bytes = bucket_bytes
        self._tables = SpecTables(session)
        self.background = BackgroundWriter()
        self.buffers = SnapshotBuffers(bucket_bytes)

    def begin(self, call: str, check: Callable[[], None] | None = None, *, use_async: bool = False) -> None:
        """Meet all ranks, when the save before has ended.

        Args:
            call: What the user called; appears in messages.
            check: Raises, on rank 0, what stands in the way.
            use_async: The call takes a snapshot; others give its memory back.

        Collective: every rank.
        """
        error = self.background.join() if self.background.is_started else None
        if not use_async:
            self.buffers.release()
        if error is None and check is not None and self.session.rank == 0:
            try:
                check()
            except (CheckpointError, OSError) as found:
                error = found
        self.session.begin(call, error)

    def save(
        self,
        parts: Sequence[Part],
        target: Target,
        call: str,
        *,
        texts: Mapping[str, str] | None = None,
        use_async: bool = False,
        checksums: bool = False,
        commit: Callable[[list[WrittenFile]], None] | None = None,
    ) -> list[WrittenFile]:
        """Write parts and further files into a folder, and commit them together, when the save before has ended.

        The folder itself is not renamed; ``commit`` may do that. Files have their own names when it runs,
        synced, after every rank has written. If anything fails, on any rank, ``commit`` has not been called.

        Args:
            parts: Models and optimizers.
            target: Where the files go.
            call: What the user called; appears in messages.
            texts: Further files and their content; those of all ranks are written, the lowest rank's of equal names.
            use_async: Copy all values, return, and do the rest in the background, ``commit`` too.
            checksums: Tell each file's blocks and their checksums in the list.
            commit: Called on rank 0 with the list of files; with ``use_async`` in a thread, where it must not use
                process groups.

        Returns:
            The files, on rank 0; an empty list elsewhere, and with ``use_async``.

        Raises:
            CheckpointError: If anything failed on any rank.
            MissingRanksError: If some ranks do not call this.

        Collective: every rank.
        """
        self.begin(call, target.check, use_async=use_async)
        session, values = self.session, _OwnedValues(parts)
        job = _Save(
            call=call,
            target=target,
            parts=parts,
            values=values,
            texts=texts or {},
            checksums=checksums,
            commit=commit,
        )
        if not use_async:
            return self._write(job)
        # From here on, whatever goes wrong is told to the other ranks in the background, which has a process group of
        # its own: this rank is through when its values are copied.
        copied = _CopiedValues(values, self.buffers)
        group = session.cpu_group() if session.world_size > 1 else None
        job = replace(job, values=copied, group=group)
        number = next(current_world().jobs)

        def run() -> None:
            try:
                self._write(job)
            finally:
                session.keep_store_alive(f"checkpoint/{number}/left")

        session.before_close(self.background.settle)
        self.background.start(call, run)
        return []

    def _write(self, save: _Save) -> list[WrittenFile]:
        """Plan a save with all ranks, write, show the files, and commit."""
        session, target = self.session, save.target
        try:
            plan = self._plan(save)
            is_one_host = len(set(session.hosts(save.group))) == 1
            side_by_side = target if isinstance(target, FolderTarget) and is_one_host else None
            with session.together(f"{save.call} (prepare)", target.path, for_long=True):
                if session.rank == 0:
                    target.prepare(plan, creates_files=side_by_side is not None)
            job = WriteJob(
                session=session,
                call=save.call,
                plan=plan,
                fragments=(each for each in save.values.fragments() if each.key not in plan.elsewhere[each.part]),
                bucket_bytes=self._bucket_bytes,
                checksums=save.checksums,
                group=save.group,
            )
            with timed(save.call, target.path, plan.total_bytes):
                if side_by_side is not None:
                    sums = write_in_place(job, side_by_side)
                else:
                    sums = write_by_owners(job, target, None if save.values.stay else self.buffers)
            return self._publish(save, plan, sums)
        except BaseException:
            target.discard()
            raise
        finally:
            target.close()

    def _plan(self, save: _Save) -> SavePlan:
        """Tell all ranks what each writes, and compute the same layout on each."""
        session, folder = self.session, save.target.path
        told, owned = list[list[Any]](), list[OwnedTensors]()

        def tell() -> list[Any]:
            for part, (facts, held) in zip(save.parts, save.values.facts(), strict=True):
                told.append([self._tables.tell(part, held), *facts])
                owned.append(held)
            return [*itertools.chain(*told), dict(save.texts), new_token() if session.rank == 0 else None]

        gathered = session.gather_each(save.call, folder, tell, save.group)
        # What follows is computed from the same values on every rank, and so raises on all of them or on none.
        texts: dict[str, str] = {}
        for rank_texts in distinct(entries[-2] for entries in gathered):
            texts = rank_texts | texts  # the lowest rank's of equal names
        merged: list[MergedPart] = []
        specs = []
        ends = list(itertools.accumulate(map(len, told), initial=0))
        for part, held, (begin, end) in zip(save.parts, owned, itertools.pairwise(ends), strict=True):
            merged.append(part.merge([entries[begin + 1 : end] for entries in gathered], session.rank))
            of_ranks = [entries[begin] for entries in gathered]
            specs.append(self._tables.merge(part, held, of_ranks, merged[-1].specs, save.group))
        return make_plan(folder, gathered[0][-1], save.parts, merged, specs, texts)

    def _publish(self, save: _Save, plan: SavePlan, sums: Sums) -> list[WrittenFile]:
        """Show the files and commit them. What rank 0 alone does one after the other takes one meeting."""
        session, target, written = self.session, save.target, list[WrittenFile]()

        def commit(plan: SavePlan, sums: Sums) -> None:
            written.extend(WrittenFile(name=name, nbytes=sums[name][0], blocks=sums[name][1]) for name in plan.names)
            if save.commit is not None:
                save.commit(written)

        if session.rank == 0:
            sums |= _sums_of_texts(plan, checksums=save.checksums)
        on_all = [target.reveal] if target.reveals_on_all else []
        beats = [target.announce, target.reveal, target.settle, commit]
        for is_on_all, together in itertools.groupby(beats, lambda beat: beat in on_all):
            with session.together(f"{save.call} (commit)", target.path, for_long=True, nbytes=plan.total_bytes):
                for beat in together:
                    if is_on_all or session.rank == 0:
                        beat(plan, sums)
        return written


def _sums_of_texts(plan: SavePlan, *, checksums: bool) -> Sums:
    contents = {name: text.encode() for name, text in plan.texts.items()}
    return {name: (len(content), _blocks_of(content) if checksums else ()) for name, content in contents.items()}


def _blocks_of(content: bytes) -> tuple[Block, ...]:
    hasher = BlockHasher(block_sizes([len(content)]))
    hasher.update(content)
    return tuple(hasher.blocks)


class _OwnedValues:
    """What this rank writes of the parts of a save.

    Shards whose values stay where they are, are listed once: a model of thousands of tensors takes as long to list as
    hundreds of megabytes to copy.

    Args:
        parts: Models and optimizers.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._listed: dict[int, list[TensorShard]] = {}

    @property
    def stay(self) -> bool:
        """Whether fragments may be read later as well, and not only before the next one is asked for."""
        return all(part.keeps_values for part in self._parts)

    def facts(self) -> list[tuple[list[Any], OwnedTensors]]:
        """Return, for each part, what this rank tells the others, and the tensors that it owns parts of."""
        facts = []
        for index, part in enumerate(self._parts):
            told = part.facts()
            if part.keeps_values:
                self._listed[index] = list(part.owned_shards())
            facts.append((told, OwnedTensors.of(part, self._owned(index))))
        return facts

    def fragments(self) -> Iterable[Fragment]:
        """Yield what this rank writes."""
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


class _CopiedValues:
    """A copy of what this rank writes. What failed while it was made is raised when others ask for its facts.

    Args:
        values: What is copied.
        buffers: The memory of the copy.
    """

    stay = True

    def __init__(self, values: _OwnedValues, buffers: SnapshotBuffers) -> None:
        self._facts = list[tuple[list[Any], OwnedTensors]]()
        self._fragments = list[Fragment]()
        self._buffers = buffers
        self._failure: Exception | None = None
        try:
            self._facts = values.facts()
            self._fragments = buffers.take(values.fragments())
        except Exception as caught:  # noqa: BLE001 - raised in the background, on every rank
            self._failure = caught

    def facts(self) -> list[tuple[list[Any], OwnedTensors]]:
        """Return what `_OwnedValues.facts` returned when the copy was made."""
        if self._failure is not None:
            raise self._failure
        return self._facts

    def fragments(self) -> Iterable[Fragment]:
        """Return the copies, when they have ended."""
        self._buffers.wait()
        return self._fragments
