"""How a save goes: what ranks tell each other, who writes, and when files get their names; now or in the background."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError
from booster_runtime.checkpoint.progress import Progress
from booster_runtime.checkpoint.save.async_writer import BackgroundWriter, SnapshotBuffers
from booster_runtime.checkpoint.save.fragments import Fragment
from booster_runtime.checkpoint.save.job import (
    JobPlan,
    WriteJob,
    WrittenFile,
    fragments_of,
    local_specs,
    make_plan,
    merge_specs,
)
from booster_runtime.checkpoint.save.writer import (
    FileWriter,
    OneBucket,
    receive_fragments,
    send_fragments,
    write_directly,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from booster_runtime.checkpoint.save.parts import Part
    from booster_runtime.checkpoint.session import Route, Session


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
        self._session = session
        self._bucket_bytes = bucket_bytes
        self.background = BackgroundWriter()
        self.buffers = SnapshotBuffers(bucket_bytes)

    def save(
        self,
        name: str,
        folder: Path,
        parts: Sequence[Part],
        *,
        texts: Mapping[str, str] | None = None,
        check: Callable[[], None] = lambda: None,
        use_async: bool = False,
        want_checksums: bool = False,
        commit: Callable[[list[WrittenFile]], None] | None = None,
    ) -> list[WrittenFile]:
        """Write parts and further files into a folder; see `CheckpointFiles.write_folder`.

        Args:
            name: What the user called; appears in messages.
            folder: Where the files go; made if it does not exist.
            parts: Models and optimizers.
            texts: Further files and their content.
            check: Raises, on rank 0, where the folder can't be written to.
            use_async: Copy all values, return, and do the rest in the background.
            want_checksums: Tell each file's xxh3 in the list.
            commit: Called on rank 0 with the list of files, after every rank has written.

        Raises:
            CheckpointError: If anything failed on any rank.

        Collective: every rank.
        """
        session = self._session
        error = self.background.join()
        if error is None and session.rank == 0:
            error = _error_of(check)
        session.begin(name, error)
        job = _Save(
            name=name, folder=folder, parts=parts, texts=dict(texts or {}), want_checksums=want_checksums, commit=commit
        )
        if not use_async:
            return self._run(
                job, lambda: [(part.local_facts(), local_specs(part)) for part in parts], lambda: fragments_of(parts)
            )
        # From here on, whatever goes wrong is told to the other ranks in the background: this rank is through when
        # its values are copied. The background has a process group of its own.
        facts, fragments, failure = None, list[Fragment](), None
        try:
            facts = [(part.local_facts(), local_specs(part)) for part in parts]
            fragments = self.buffers.take(fragments_of(parts))
        except Exception as caught:  # noqa: BLE001 - raised in the background, on every rank
            failure = caught
        group = session.cpu_group() if session.world_size > 1 else None

        def known_facts() -> Any:
            if failure is not None:
                raise failure
            return facts

        session.before_close(self.background.settle)
        self.background.start(
            name, lambda: self._run(replace(job, group=group, in_background=True), known_facts, lambda: fragments)
        )
        return []

    def _run(
        self, save: _Save, facts: Callable[[], Any], fragments: Callable[[], Iterable[Fragment]]
    ) -> list[WrittenFile]:
        """Plan a save with all ranks, write, and commit."""
        session = self._session
        token, undo = session.prepare_folder(save.folder, save.group)
        try:
            plan, route = self._plan(save, token, facts)
            if not route.is_shared:
                session.cpu_group()
            job = WriteJob(
                plan,
                rank=session.rank,
                world_size=session.world_size,
                write=lambda: self._write(plan, route, fragments(), is_shown=not save.in_background),
                agree=session.agree(save.name),
                exchange=session.exchange(save.name, token),
                is_route_shared=route.is_shared,
                one_host=route.one_host or not route.is_shared,
                want_checksums=save.want_checksums,
                commit=save.commit,
            )
            job.run()
        except BaseException:
            undo()
            raise
        finally:
            if save.in_background:
                session.linger(token)
        return job.written

    def _plan(self, save: _Save, token: str, facts: Callable[[], Any]) -> tuple[JobPlan, Route]:
        """Tell all ranks what each writes, and compute the same layout on each."""
        session, folder = self._session, save.folder
        gathered = session.gather(
            save.name, folder, lambda: (facts(), save.texts, session.look_for_token(folder, token)), save.group
        )
        # What follows is computed from the same values on every rank, and so raises on all of them or on none.
        route = session.choose_route(folder, token, [seen for _, _, seen in gathered])
        texts: dict[str, str] = {}
        for _, rank_texts, _ in reversed(gathered):
            texts |= rank_texts
        specs = []
        for index, part in enumerate(save.parts):
            part_facts = [rank_facts[index][0] for rank_facts, _, _ in gathered]
            part.learn(part_facts, session.rank)
            owned = [rank_facts[index][1] for rank_facts, _, _ in gathered]
            extra = [part.learned_specs(entry, rank) for rank, entry in enumerate(part_facts)]
            specs.append(merge_specs([[*a, *b] for a, b in zip(owned, extra, strict=True)]))
        return make_plan(folder, token, save.parts, specs, texts), route

    def _write(self, plan: JobPlan, route: Route, fragments: Iterable[Fragment], *, is_shown: bool) -> None:
        session = self._session
        fragments = (fragment for fragment in fragments if fragment.key not in plan.elsewhere[fragment.part])
        bucket = OneBucket(self._bucket_bytes)
        total = plan.total_bytes // (session.world_size if route.is_shared else 1)
        with Progress("Saving", total, is_shown=is_shown and session.rank == 0) as progress:
            if route.is_shared:
                with FileWriter(plan, one_host=route.one_host, progress=progress.advance) as writer:
                    write_directly(writer, fragments, bucket)
                    writer.sync()
                return
            group = session.cpu_group()
            if session.rank != 0:
                send_fragments(fragments, bucket, group, 0)
                return
            with FileWriter(plan, progress=progress.advance) as writer:
                failure: Exception | None = None
                try:
                    write_directly(writer, fragments, bucket)
                except Exception as error:  # noqa: BLE001 - the senders have to be heard out first
                    failure = error
                sources = range(1, session.world_size)
                receive_fragments(writer if failure is None else None, plan, bucket, group, sources)
                if failure is not None:
                    raise failure
                writer.sync()


@dataclass(frozen=True, kw_only=True)
class _Save:
    """One call's wishes; see `Saver.save`."""

    name: str
    folder: Path
    parts: Sequence[Part]
    texts: dict[str, str]
    want_checksums: bool
    commit: Callable[[list[WrittenFile]], None] | None
    in_background: bool = False
    group: ProcessGroup | None = None


def _error_of(check: Callable[[], None]) -> Exception | None:
    try:
        check()
    except (CheckpointError, OSError) as error:
        return error
    return None
