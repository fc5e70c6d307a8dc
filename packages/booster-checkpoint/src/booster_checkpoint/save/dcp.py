"""Writes folders of ``torch.distributed.checkpoint`` (DCP), for those who want torch's own tools to read them.

torch plans and writes the table; this file tells it which boxes of which tensors this rank holds, and writes them one
after the other: torch's own loop keeps a copy of every tensor until its file is complete. Flat ranges become a few
boxes. A tied tensor is written once and listed under all of its names, and an optimizer's state has torch's own nesting
(``state.<parameter>.<state>``, ``param_groups``).

A folder that is there gets its new files next to the old ones. Replacing the table is what moves from the one to the
other, so that a kill at any instant leaves one of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import warnings
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from booster_checkpoint.files.dcp import GROUPS, METADATA, SHAPES, STATE, read_table
from booster_checkpoint.save.parts import MergedPart, ModelPart, OptimizerPart, Part
from booster_checkpoint.save.plan import OwnedTensors, SpecTables
from booster_checkpoint.storage import LocalLocation, locate
from booster_checkpoint.storage.location import new_token, sync_folder, temporary_name, temporary_pattern
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks import name_ranks
from booster_core.state import OptimizerInfo, box_shape, distinct, pack, regions_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from booster_checkpoint.session import Session
    from booster_checkpoint.storage import Location
    from booster_core.state import TensorShard

_PathInState = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A box of a tensor that this rank writes: a run of a shard's values."""

    shard: TensorShard
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]


class _ShardPlanner(SavePlanner):
    """Tells torch what this rank holds, and gives it the values when it asks.

    Args:
        chunks: This rank's boxes, by their offsets.
        sizes: Shape and dtype of each whole tensor written here in part.
        values: Values that are not tensors, and that this rank writes.
        paths: The path of each name in the nested state.
    """

    def __init__(
        self,
        chunks: Mapping[MetadataIndex, _Chunk],
        sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        values: Mapping[str, Any],
        paths: Mapping[str, _PathInState],
    ) -> None:
        self._chunks = chunks
        self._sizes = sizes
        self._values = values
        self._paths = dict(paths)

    @override
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    @override
    def create_local_plan(self) -> SavePlan:
        items = []
        for index, chunk in self._chunks.items():
            assert index.offset is not None, "made with an offset"
            shape, dtype = self._sizes[index.fqn]
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=index.offset, sizes=torch.Size(chunk.shape)),
                properties=TensorProperties(dtype=dtype),
                size=torch.Size(shape),
            )
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in self._values]
        return SavePlan(items, planner_data=self._paths)

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        table: dict[str, Any] = {}
        paths: dict[str, _PathInState] = {}
        for plan in all_plans:
            paths |= plan.planner_data
            for item in plan.items:
                if item.tensor_data is None:
                    table[item.index.fqn] = BytesStorageMetadata()
                    continue
                data = item.tensor_data
                entry = table.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
                entry.chunks.append(data.chunk)
        return all_plans, Metadata(state_dict_metadata=table, planner_data=paths)

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._values[write_item.index.fqn], stream)
            return stream
        chunk = self._chunks[write_item.index]
        count = torch.Size(chunk.shape).numel()
        values = torch.empty(count, dtype=chunk.dtype)
        pack(chunk.shard.data.detach(), chunk.start, chunk.start + count, values)
        return values.view(chunk.shape)


class _StreamWriter(FileSystemWriter):
    """torch's writer, with one tensor in memory at a time, and a table that lists tied tensors under all their names.

    Args:
        path: The folder.
        name: The name of this rank's file.
        aliases: For each further name of a tied tensor, its first name.
        below: The key of the state that is written, in the nested one.
    """

    def __init__(self, path: Path, name: str, aliases: Mapping[str, str], below: _PathInState) -> None:
        super().__init__(path)
        self._file = path / name
        self._aliases, self._below = aliases, below

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with self._file.open("wb") as stream:
            for item in plan.items:
                start = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    _save(data, stream)
                del data
                nbytes = stream.tell() - start
                place = _StorageInfo(self._file.name, start, nbytes)
                results.append(WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=place))
            stream.flush()
            os.fsync(stream.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        table: dict[str, Any] = metadata.state_dict_metadata
        further: list[WriteResult] = []
        for further_name, first_name in self._aliases.items():
            alias, name = (".".join((*self._below, each)) for each in (further_name, first_name))
            if name in table and alias not in table:
                table[alias] = table[name]
                further += [
                    replace(result, index=replace(result.index, fqn=alias))
                    for rank_results in results
                    for result in rank_results
                    if result.index.fqn == name
                ]
                if isinstance(metadata.planner_data, dict):
                    metadata.planner_data[alias] = (*self._below, further_name)
        super().finish(metadata, [*results, further])


def _save(tensor: torch.Tensor, stream: IO[bytes]) -> None:
    """Write a tensor, and raise what the file system said, which torch leaves behind its own error."""
    try:
        torch.save(tensor, stream)
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
        with session.together(name, path):
            planner = _make_planner(part, merged, session.rank, below)
            file_name = f"__{session.rank}_{f'{token}_' if is_replaced else ''}0.distcp"  # not those of the old one
        group = session.cpu_group() if session.world_size > 1 else None
        # Inside of `together` although it communicates: torch carries a failure on one rank to all of them.
        with session.together(name, path), _failures_as_our_own(session.rank), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a world of one is meant
            save(
                {},
                storage_writer=_StreamWriter(temporary, file_name, aliases, below),
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
        with session.together(name, path):
            if session.rank == 0:
                _put_in_place(temporary, path)
    except BaseException:
        if session.rank == 0 and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for above in made:
            with contextlib.suppress(OSError):
                above.rmdir()
        raise


@contextlib.contextmanager
def _failures_as_our_own(rank: int) -> Iterator[None]:
    """Raise what torch's exception carries, which is no `Exception`: what failed on this rank.

    Where nothing has, the body ends, and the rank hears of the others' errors as of any other.
    """
    try:
        yield
    except CheckpointException as error:
        failures = {other: failure for other, (failure, _) in error.failures.items()}
        if rank in failures:
            raise failures[rank] from error
        interrupted = [other for other, failure in failures.items() if not isinstance(failure, Exception)]
        if interrupted:  # it ends, and tells nobody
            msg = f"The save was interrupted on {name_ranks(interrupted)}; nothing was changed."
            raise CheckpointError(msg) from error


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
        sync_folder(path.parent)
        return
    names = {entry.name for entry in temporary.iterdir()}
    for name in sorted(names - {METADATA}):
        (temporary / name).rename(path / name)
    sync_folder(path)
    (temporary / METADATA).replace(path / METADATA)
    sync_folder(path)
    temporary.rmdir()
    for entry in list(path.iterdir()):
        if entry.name not in names:
            shutil.rmtree(entry, ignore_errors=True)
            with contextlib.suppress(OSError):  # the next save tries again
                entry.unlink(missing_ok=True)


def _make_planner(part: Part, merged: MergedPart, rank: int, below: _PathInState) -> _ShardPlanner:
    """Return what this rank writes of a part, below a key of the nested state."""
    chunks: dict[MetadataIndex, _Chunk] = {}
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    paths: dict[str, _PathInState] = {}
    # Not the tensors inside of extra state: torch pickles a module's extra state as one object.
    for shard in part.owned_shards():
        path = (*below, shard.name) if shard.state is None else (*below, STATE, shard.name, shard.state)
        fqn = ".".join(path)
        dtype = part.file_dtype(shard)
        sizes[fqn] = shard.global_shape, dtype
        paths[fqn] = path
        for region in regions_of(shard.box, shard.flat):
            index = MetadataIndex(fqn, torch.Size(start for start, _ in region.box))
            chunks[index] = _Chunk(shard, dtype, region.start, box_shape(region.box))
        if 0 in shard.global_shape:
            index = MetadataIndex(fqn, torch.Size(0 for _ in shard.global_shape))
            chunks[index] = _Chunk(shard, dtype, 0, shard.global_shape)
    values: dict[str, Any] = {}
    for path, value in _values_of(part, merged, rank).items():
        fqn = ".".join(str(step) for step in (*below, *path))
        values[fqn] = value
        paths[fqn] = (*below, *path)
    return _ShardPlanner(chunks, sizes, values, paths)


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
    return values
