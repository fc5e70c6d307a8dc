"""A write job: files whose layout every rank knows, written side by side and committed only when all is on disk.

The phases are plan (collective), snapshot (only where writing goes on in the background), and `WriteJob.run`, which
needs no collectives but a way to agree, and so runs in a thread as well. Within it, in torchsnapshot's order: files are
laid out under temporary names, every rank writes its bytes and syncs them, all agree that they have, and only then one
rank renames the files and commits what they belong to.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from booster_core.errors import BoosterError, CheckpointError, shorten
from booster_runtime.checkpoint.files.index import index_text
from booster_runtime.checkpoint.files.layout import TensorSpec, in_file_order, split_into_files
from booster_runtime.checkpoint.files.opening import container_for
from booster_runtime.checkpoint.save.fragments import Fragment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from booster_core.state import TensorShard
    from booster_runtime.checkpoint.save.parts import Part

TEMPORARY = ".tmp"
TOKEN_CHARACTERS = 16
"""Length of the hexadecimal text in temporary names that no two saves share."""
_NUMBERED = re.compile(r"-\d{5,}-of-\d{5,}\.")
_TEMPORARY_NAME = re.compile(rf"\.(.+)\.[0-9a-f]{{{TOKEN_CHARACTERS}}}{re.escape(TEMPORARY)}")


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file of tensors that a save writes.

    Args:
        name: Its name in the job's folder.
        suffix: The kind of file.
        specs: Its tensors, in the order of their values.
        values: Its other values, as encoded JSON.
    """

    name: str
    suffix: str
    specs: tuple[TensorSpec, ...]
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that was written.

    Args:
        name: Its name in the job's folder.
        nbytes: Its size.
        checksum: The hexadecimal xxh3 (64 bits) of its content, where it was asked for.
        tensors: The names of its tensors.
    """

    name: str
    nbytes: int
    checksum: str | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The layout of a save; the same on every rank.

    Args:
        folder: Where the files go; made if it does not exist.
        token: Text that no other save uses; part of temporary names.
        files: The files of tensors.
        texts: Other files and their content.
        last: The name of the text that makes the others valid (an index), which is renamed last.
        homes: For each part, and each of its tensors, the position of its file in ``files``.
        elsewhere: For each part, names of tensors that this rank holds but that another rank writes.
        obsolete: Tells names of files of an older save that this one replaces.
        marks: Names of the files that say so while several files are replaced.
        healed: Names of such files of interrupted saves that this save replaces, and their indexes.
    """

    folder: Path
    token: str
    files: tuple[PlannedFile, ...]
    texts: dict[str, str]
    last: tuple[str, ...]
    homes: tuple[dict[str, int], ...]
    elsewhere: tuple[set[str], ...]
    obsolete: Callable[[str], bool]
    marks: tuple[str, ...] = ()
    healed: Mapping[str, str] = field(default_factory=dict)

    def temporary(self, name: str) -> Path:
        """Return a file's path until it is complete."""
        return self.folder / f".{name}.{self.token}{TEMPORARY}"

    @property
    def total_bytes(self) -> int:
        """Size of all tensors' values."""
        return sum(spec.nbytes for file in self.files for spec in file.specs)


def local_specs(part: Part) -> list[tuple[str, tuple[int, ...], Any, int]]:
    """Return (name, shape, dtype in the file, elements owned here) of the tensors of which this rank writes something.

    Collective: none.
    """
    specs: dict[str, list[Any]] = {}
    for shard in part.owned_shards():
        spec = specs.setdefault(shard.key, [shard.global_shape, part.file_dtype(shard), 0])
        if spec[0] != shard.global_shape:
            msg = f"'{shard.key}' has shards of shape {spec[0]} and of shape {shard.global_shape}."
            raise CheckpointError(msg)
        spec[2] += shard.numel
    return [(key, shape, dtype, numel) for key, (shape, dtype, numel) in specs.items()]


def merge_specs(gathered: Sequence[Sequence[tuple[str, tuple[int, ...], Any, int]]]) -> list[TensorSpec]:
    """Return the whole tensors that all ranks' shards make up.

    Raises:
        CheckpointError: If a tensor is not owned exactly once, or ranks disagree about its shape or dtype.
    """
    specs: dict[str, TensorSpec] = {}
    owned: dict[str, int] = defaultdict(int)
    for entries in gathered:
        for key, shape, dtype, numel in entries:
            spec = specs.setdefault(key, TensorSpec(key=key, shape=shape, dtype=dtype))
            if (spec.shape, spec.dtype) != (shape, dtype):
                msg = f"Ranks disagree about '{key}': {spec.shape} of {spec.dtype}, and {shape} of {dtype}."
                raise CheckpointError(msg)
            owned[key] += numel
    wrong = [
        f"{key} ({owned[key]} of {spec.nbytes // spec.dtype.itemsize} elements)"
        for key, spec in specs.items()
        if owned[key] * spec.dtype.itemsize != spec.nbytes
    ]
    if wrong:
        msg = (
            f"{len(wrong)} tensors are not owned by exactly one rank in each of their parts: {shorten(wrong)}. Are "
            "all ranks "
            "saving the same model, under the plugin that boosted it?"
        )
        raise CheckpointError(msg)
    return list(specs.values())


def make_plan(
    folder: Path, token: str, parts: Sequence[Part], specs: Sequence[Sequence[TensorSpec]], texts: dict[str, str]
) -> JobPlan:
    """Return where everything goes, from what all ranks know alike.

    Args:
        folder: Where the files go.
        token: Text that no other save uses.
        parts: The parts; they have learned what all ranks said.
        specs: For each part, its whole tensors.
        texts: Further files and their content.
    """
    files: list[PlannedFile] = []
    homes, texts, last = [], dict(sorted(texts.items())), []
    for part, part_specs in zip(parts, specs, strict=True):
        divided = split_into_files(part_specs, part.max_bytes)
        values = part.values()
        names = part.names
        home: dict[str, int] = {}
        weight_map: dict[str, str] = {}
        for number, file_specs in enumerate(divided, start=1):
            single = part.file_name or names.single
            name = names.part(number, len(divided)) if part.is_divided else single
            home |= {spec.key: len(files) for spec in file_specs}
            weight_map |= {spec.key: name for spec in file_specs}
            first_values = values if number == 1 else {}
            files.append(
                PlannedFile(name=name, suffix=names.suffix, specs=in_file_order(file_specs), values=first_values)
            )
        homes.append(home)
        texts |= part.texts()
        if part.is_divided:
            ordered = {spec.key: weight_map[spec.key] for file_specs in divided for spec in file_specs}
            texts[names.index] = index_text(ordered, sum(spec.nbytes for spec in part_specs))
            last.append(names.index)
    written = {file.name for file in files} | texts.keys()
    # A form that readers look for first would be read in place of this one.
    replaced = [form for part in parts if part.is_divided for form in (part.names, *part.names.read_first)]
    in_one_file = [part.names for part in parts if part.file_name in (None, part.names.single)]

    def is_obsolete(name: str) -> bool:
        return name not in written and any(names.includes(name) for names in replaced)

    return JobPlan(
        folder=folder,
        token=token,
        files=tuple(files),
        texts=texts,
        last=tuple(last),
        homes=tuple(homes),
        elsewhere=tuple(part.extra_elsewhere() for part in parts),
        obsolete=is_obsolete,
        marks=tuple(part.names.mark for part in parts if part.is_divided),
        healed={names.mark: names.index for names in (*replaced, *in_one_file)},
    )


def fragments_of(parts: Sequence[Part]) -> Iterator[Fragment]:
    """Yield what this rank writes, one shard after the other; a fragment is read before the next one is asked for."""
    for index, part in enumerate(parts):
        for shard in chain(part.owned_shards(), part.extra_shards()):
            if shard.numel:
                yield _fragment(shard, index, part.file_dtype(shard))


def _fragment(shard: TensorShard, part: int, dtype: Any) -> Fragment:
    return Fragment(
        part=part,
        key=shard.key,
        shape=shard.global_shape,
        dtype=dtype,
        box=shard.box,
        flat=shard.flat_range,
        data=shard.data.detach(),
    )


class WriteJob:
    """One save on its way to the disk.

    Args:
        plan: What is written where.
        rank: This rank; rank 0 lays out files, renames them and commits.
        world_size: Number of ranks.
        write: Writes this rank's fragments, and syncs the files it wrote to.
        agree: Called as ``agree(step, error)`` on every rank in step; raises on all ranks if any brought an error.
        exchange: Called on every rank with a JSON text; returns on rank 0 all ranks' texts, after an agreement.
        is_route_shared: Whether all ranks see the folder.
        one_host: Whether all ranks that write run on one host.
        want_checksums: Compute each file's checksum.
        commit: Called on rank 0 with the list of files when all of them have their names.
    """

    def __init__(
        self,
        plan: JobPlan,
        *,
        rank: int,
        world_size: int,
        write: Callable[[], None],
        agree: Callable[[str, Exception | None], None],
        exchange: Callable[[str, Exception | None, str], list[str]],
        is_route_shared: bool = True,
        one_host: bool = True,
        want_checksums: bool = False,
        commit: Callable[[list[WrittenFile]], None] | None = None,
    ) -> None:
        self.plan = plan
        self._rank = rank
        self._world_size = world_size if is_route_shared else 1
        self._one_host = one_host
        self._write = write
        self._agree = agree
        self._exchange = exchange
        self._want_checksums = want_checksums
        self._commit = commit
        self.written: list[WrittenFile] = []

    def run(self) -> None:
        """Write, and commit once every rank has written.

        Raises:
            CheckpointError: If anything failed on any rank. Until the commit, no file has been replaced then, and none
                is left half-written.

        Collective: every rank, but through ``agree`` only; safe in a background thread if ``agree`` is.
        """
        try:
            self._step("create files", self._create if self._rank == 0 else _nothing)
            self._step("write", self._write)
            checksums = self._checksums()
        except BaseException:
            if self._rank == 0:
                self._remove_temporaries()
            raise
        self._step("commit", (lambda: self._finish(checksums)) if self._rank == 0 else _nothing)

    def _step(self, step: str, work: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as caught:  # noqa: BLE001 - whatever happened here, the other ranks have to hear of it
            error = as_checkpoint_error(caught, self.plan.folder)
        self._agree(step, error)

    def _create(self) -> None:
        from booster_runtime.checkpoint.files.raw import drop_pages, reserve

        plan = self.plan
        plan.folder.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        for file in plan.files:
            path = plan.temporary(file.name)
            container_for(file.suffix).create(path, file.specs, file.values)
            reserve(path)
            if not self._one_host:
                drop_pages(path)
        for name, text in plan.texts.items():
            with plan.temporary(name).open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())

    def _remove_stale(self) -> None:
        """Delete what a killed save of the same checkpoint has left, in however many files."""
        names = {*(file.name for file in self.plan.files), *self.plan.texts}
        for path in self.plan.folder.iterdir():
            match = _TEMPORARY_NAME.fullmatch(path.name)
            if match and (match[1] in names or self.plan.obsolete(match[1])):
                path.unlink(missing_ok=True)

    def _remove_temporaries(self) -> None:
        for name in (*(file.name for file in self.plan.files), *self.plan.texts):
            with contextlib.suppress(OSError):
                self.plan.temporary(name).unlink(missing_ok=True)

    def _checksums(self) -> dict[str, str]:
        """Return each file's checksum on rank 0; ranks share the work by file."""
        if not self._want_checksums:
            return {}
        found: dict[str, str] = {}
        error: Exception | None = None
        try:
            names = [file.name for file in self.plan.files]
            if self._rank == 0:
                found = {name: file_checksum(self.plan.temporary(name)) for name in self.plan.texts}
            if self._rank < self._world_size:
                for name in names[self._rank :: self._world_size]:
                    found[name] = file_checksum(self.plan.temporary(name))
        except OSError as caught:
            error = as_checkpoint_error(caught, self.plan.folder)
        texts = self._exchange("compute checksums", error, json.dumps(found))
        return {name: digest for text in texts for name, digest in json.loads(text).items()}

    def _finish(self, checksums: dict[str, str]) -> None:
        """Rename the files to their names, the one that makes them valid last, and commit."""
        plan = self.plan
        names = [name for name in (*(file.name for file in plan.files), *plan.texts) if name not in plan.last]
        tensors = {file.name: tuple(spec.key for spec in file.specs) for file in plan.files}
        self.written = [
            WrittenFile(
                name=name,
                nbytes=plan.temporary(name).stat().st_size,
                checksum=checksums.get(name),
                tensors=tensors.get(name, ()),
            )
            for name in (*names, *plan.last)
        ]
        replaced = [name for name in (*names, *plan.last) if (plan.folder / name).exists()]
        present = {entry.name for entry in plan.folder.iterdir()}
        # Without its index or its only file, an older form is not looked for: its numbered files go afterwards.
        obsolete = sorted(filter(plan.obsolete, present), key=lambda name: (bool(_NUMBERED.search(name)), name))
        # One file is replaced at once. Several are not: until the last is in place, a note tells readers so.
        marks = plan.marks if replaced or obsolete else ()
        for mark in marks:
            (plan.folder / mark).touch()
        if marks:
            sync_folder(plan.folder)
        for name in (*names, *plan.last):
            plan.temporary(name).replace(plan.folder / name)
        for name in obsolete:
            (plan.folder / name).unlink(missing_ok=True)
        self._heal(marks, present)
        sync_folder(plan.folder)
        if self._commit is not None:
            self._commit(self.written)

    def _heal(self, marks: Sequence[str], present: set[str]) -> None:
        """Take away the marks of this save, and those of interrupted ones that it replaces."""
        plan = self.plan
        healed = {mark: index for mark, index in plan.healed.items() if mark in present}
        for index in healed.values():
            if index not in plan.last:
                (plan.folder / index).unlink(missing_ok=True)  # of files of two saves
        if marks or healed:
            sync_folder(plan.folder)
        for mark in {*marks, *healed}:
            (plan.folder / mark).unlink(missing_ok=True)


def file_checksum(path: Path) -> str:
    """Return the hexadecimal xxh3 (64 bits) of a file's content, as ``xxhsum -H3`` prints it."""
    import xxhash

    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(1 << 22))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_checkpoint_error(error: Exception, path: Path) -> Exception:
    """Return an error of the operating system as one that says what it means for a checkpoint."""
    if isinstance(error, BoosterError) or not isinstance(error, OSError):
        return error
    remedies = {
        errno.ENOSPC: "The disk is full: free some space, or save elsewhere.",
        errno.EDQUOT: "The disk quota is used up: free some space, or save elsewhere.",
        errno.EACCES: "Permission is denied: check the folder's owner and mode.",
        errno.EPERM: "Permission is denied: check the folder's owner and mode.",
        errno.EROFS: "The file system is read-only: save elsewhere.",
        errno.EEXIST: "A part of the path is a file, not a folder: pass another path.",
        errno.ENOTDIR: "A part of the path is a file, not a folder: pass another path.",
    }
    where = error.filename or path
    reason = error.strerror or str(error)
    remedy = remedies.get(error.errno or 0, "")
    failure = CheckpointError(f"'{path}' cannot be written: {reason} ('{where}'). {remedy}".rstrip())
    failure.__cause__ = error
    return failure


def _nothing() -> None:
    pass
