"""Writes folders of ``torch.distributed.checkpoint`` (DCP), for those who want torch's own tools to read them.

Each rank writes its boxes one after the other into a file of its own, and rank 0 the table of all: torch's own loop
keeps a copy of every tensor until its file is complete. Flat ranges become a few boxes. A tied tensor is written once
and listed under all of its names, and an optimizer's state has torch's own nesting (``state.<parameter>.<state>``,
``param_groups``).

A folder that is there gets its new files next to the old ones. Replacing the table is what moves from the one to the
other, so that a kill at any instant leaves one of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from booster_checkpoint.files.dcp import DTYPES, GROUPS, METADATA, SHAPES, STATE, read_table
from booster_checkpoint.save.parts import MergedPart, ModelPart, OptimizerPart, Part
from booster_checkpoint.save.plan import OwnedTensors, SpecTables
from booster_checkpoint.storage import LocalLocation, locate
from booster_checkpoint.storage.location import new_token, sync_folders, temporary_name, temporary_pattern
from booster_core.errors import CheckpointError, ConfigError
from booster_core.state import OptimizerInfo, TensorMeta, box_numel, box_shape, distinct, full_box, pack, regions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from booster_checkpoint.session import Session
    from booster_checkpoint.storage import Location
    from booster_core.state import Box, TensorShard

_PathInState = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Item:
    """What this rank writes under one name: a box of a tensor, or a value that is none.

    Args:
        path: The keys that lead to it in the nested state; the name is these, joined.
        value: What it is, where it is no tensor.
        shard: The shard that the box is a run of values of.
        dtype: The tensor's element type in the file.
        start: Where the run begins.
        box: The index range of the whole tensor.
    """

    path: _PathInState
    value: Any = None
    shard: TensorShard | None = None
    dtype: torch.dtype = torch.float32
    start: int = 0
    box: Box = ()

    @property
    def meta(self) -> TensorMeta | None:
        """What the whole tensor is; ``None`` for a value that is none."""
        return None if self.shard is None else TensorMeta(shape=self.shard.global_shape, dtype=self.dtype)

    def content(self) -> Any:
        """Return the value, or a copy of the box' values."""
        if self.shard is None:
            return self.value
        values = torch.empty(box_numel(self.box), dtype=self.dtype)
        pack(self.shard.data.detach(), self.start, self.start + values.numel(), values)
        return values.view(box_shape(self.box))


_Written = tuple[_PathInState, "TensorMeta | None", "Box", "tuple[str, int, int]"]
"""The path of an item, the meta and box of a tensor's, and its file, first byte and number of bytes."""


def _write_items(items: Iterable[_Item], path: Path) -> list[_Written]:
    """Write a file of small ``torch.save`` files, one after the other, with one tensor in memory at a time."""
    path.parent.mkdir(exist_ok=True)
    written: list[_Written] = []
    with path.open("wb") as stream:
        for item in items:
            start = stream.tell()
            _save(item.content(), stream)
            written.append((item.path, item.meta, item.box, (path.name, start, stream.tell() - start)))
        stream.flush()
        os.fsync(stream.fileno())
    return written


def _write_table(folder: Path, told: Iterable[list[_Written]], aliases: Mapping[str, str], below: _PathInState) -> None:
    """Write the table of what all ranks have written, which lists tied tensors under all their names.

    Args:
        folder: The folder of their files.
        told: What `_write_items` returned on each rank.
        aliases: For each further name of a tied tensor, its first name.
        below: The key of the state that is written, in the nested one.
    """
    further: dict[_PathInState, list[_PathInState]] = {}
    for alias, name in aliases.items():
        further.setdefault((*below, name), []).append((*below, alias))
    entries: dict[str, Any] = {}
    paths: dict[str, _PathInState] = {}
    results = []
    for first, meta, box, (file, start, nbytes) in (each for of_rank in told for each in of_rank):
        for path in (first, *further.get(first, ())):
            name = ".".join(map(str, path))
            paths[name] = path
            index = MetadataIndex(name)
            if meta is None:
                entries[name] = BytesStorageMetadata()
            else:
                properties = TensorProperties(dtype=meta.dtype)
                entry = entries.setdefault(name, TensorStorageMetadata(properties, torch.Size(meta.shape), []))
                chunk = ChunkStorageMetadata(torch.Size(begin for begin, _ in box), torch.Size(box_shape(box)))
                entry.chunks.append(chunk)
                index = MetadataIndex(name, chunk.offsets)
            place = _StorageInfo(file, start, nbytes)
            results.append(WriteResult(index=index, size_in_bytes=nbytes, storage_data=place))
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata=entries, planner_data=paths), [results])


def _save(value: Any, stream: IO[bytes]) -> None:
    """Write a value, and raise what the file system said, which torch leaves behind its own error."""
    try:
        torch.save(value, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def save_dcp(name: str, session: Session, part: Part, folder: Location, prefix: str | None = None) -> None:
    """Write a model or an optimizer as a DCP folder.

    Args:
        name: What the user called.
        session: The ranks.
        part: The model or optimizer.
        folder: The folder; one that holds another kind of files is refused.
        prefix: The key below which the state is nested; ``None`` writes it as it is.

    Raises:
        ConfigError: If the folder is at a URL.
        CheckpointError: If the folder cannot be written, or holds something else.

    Collective: every rank.
    """
    if not isinstance(folder, LocalLocation):
        msg = (
            f"torch writes folders of `torch.distributed.checkpoint` to file systems, and '{folder}' is a URL. Save "
            "to a local folder and upload it, its '.metadata' last; or save in another form, which goes there directly."
        )
        raise ConfigError(msg)
    path, below = folder.path, () if prefix is None else (prefix,)
    made: list[Path] = []
    temporary: Path | None = None

    owned = OwnedTensors((), ())
    tables = SpecTables(session)

    def tell() -> list[Any]:
        nonlocal owned
        if session.rank == 0:
            _check_target(path, is_optimizer=isinstance(part, OptimizerPart))
            made.extend(parent for parent in path.parents if not parent.exists())
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_temporaries(path)
        owned = OwnedTensors.of(part, part.owned_shards())
        mine = (new_token(), (path / METADATA).exists()) if session.rank == 0 else None
        return [*part.facts(), tables.tell(part, owned), part.aliases(), mine]

    try:
        gathered = session.gather_each(name, path, tell)
        token, is_replaced = gathered[0][-1]
        if len(session.ranks_that_see(path.parent, token)) < session.world_size:
            msg = (
                f"`gather_dtensor=False` needs a folder that all ranks see; '{path}' is not. Use `gather_dtensor=True`."
            )
            raise CheckpointError(msg)
        temporary = path.parent / temporary_name(path.name, token)
        merged = part.merge([entries[:-3] for entries in gathered], session.rank)
        tables.merge(part, owned, [entries[-3] for entries in gathered], merged.specs, None)
        aliases = {alias: first for known in distinct(each[-2] for each in gathered) for alias, first in known.items()}
        file_name = f"__{session.rank}_{f'{token}_' if is_replaced else ''}0.distcp"  # not those of the old one
        written: list[_Written] = []
        with session.together(name, path, for_long=True):
            written = _write_items(_items_of(part, merged, session.rank, below), temporary / file_name)
        told = session.gather(name, path, lambda: written)
        with session.together(name, path):
            if session.rank == 0:
                _write_table(temporary, told, aliases, below)
                _put_in_place(temporary, path)
    except BaseException:
        if session.rank == 0 and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for above in made:
            with contextlib.suppress(OSError):
                above.rmdir()
        raise


def _check_target(path: Path, *, is_optimizer: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        msg = f"Checkpoint path '{path}' is a file, but `gather_dtensor=False` writes a folder. Pass another path."
        raise CheckpointError(msg)
    if not any(path.iterdir()):
        return
    if not (path / ".metadata").is_file():
        msg = f"'{path}' holds other files; `gather_dtensor=False` replaces the whole folder. Pass another path."
        raise CheckpointError(msg)
    table = read_table(locate(path))
    kinds = {step for key in (*table.tensors, *table.values) for step in key.split(".")[:2]}
    if (GROUPS in kinds) != is_optimizer:
        held = "an optimizer" if GROUPS in kinds else "a model"
        msg = f"'{path}' holds {held}; with `gather_dtensor=False`, model and optimizer need a folder each."
        raise CheckpointError(msg)


def clear_temporaries(path: Path) -> None:
    """Remove what killed writers of a file or folder have left next to it, as far as possible."""
    left = temporary_pattern(re.escape(path.name))
    for entry in list(path.parent.iterdir()):
        if left.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def _put_in_place(temporary: Path, path: Path) -> None:
    if not (path / METADATA).exists():  # nothing, or an empty folder
        temporary.replace(path)
        sync_folders(path.parent)
        return
    names = {entry.name for entry in temporary.iterdir()}
    for name in sorted(names - {METADATA}):
        (temporary / name).rename(path / name)
    sync_folders(path)
    (temporary / METADATA).replace(path / METADATA)
    sync_folders(path)
    temporary.rmdir()
    for entry in list(path.iterdir()):
        if entry.name not in names:
            shutil.rmtree(entry, ignore_errors=True)
            with contextlib.suppress(OSError):  # the next save tries again
                entry.unlink(missing_ok=True)


def _items_of(part: Part, merged: MergedPart, rank: int, below: _PathInState) -> Iterator[_Item]:
    """Yield what this rank writes of a part, below a key of the nested state."""
    # Not the tensors inside of extra state: torch pickles a module's extra state as one object.
    for shard in part.owned_shards():
        path = (*below, shard.name) if shard.state is None else (*below, STATE, shard.name, shard.state)
        dtype = part.file_dtype(shard)
        for region in regions_of(shard.box, shard.flat):
            yield _Item(path, shard=shard, dtype=dtype, start=region.start, box=region.box)
        if 0 in shard.global_shape:
            yield _Item(path, shard=shard, dtype=dtype, box=full_box(shard.global_shape))
    for path, value in _values_of(part, merged, rank).items():
        yield _Item((*below, *path), value)


def _values_of(part: Part, merged: MergedPart, rank: int) -> dict[_PathInState, Any]:
    if isinstance(part, ModelPart):
        here = part.extra_state()
        return {(name,): here[name] for name in merged.mine}
    if rank != 0:
        return {}
    info = OptimizerInfo.from_json(merged.values["optimizer"], "the optimizer")
    values: dict[_PathInState, Any] = {}
    for index, group in enumerate(info.groups):
        values[GROUPS, index, "params"] = list(group.params)
        values |= {(GROUPS, index, key): value for key, value in group.options.items()}
    for name, states in info.scalars.items():
        values |= {(STATE, name, state): value for state, value in states.items()}
    values[SHAPES,] = {name: list(shape) for name, shape in info.shapes.items()}
    values[DTYPES,] = info.dtype_names()
    return values
