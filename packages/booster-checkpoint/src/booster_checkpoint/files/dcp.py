"""Reads folders of ``torch.distributed.checkpoint`` (DCP) like any other file of tensors, in the parts that are needed.

DCP keeps each chunk of a tensor as a small ``torch.save`` file inside of a larger file, and a pickled table of chunks.
Every entry of the table is checked when it is read, so that what reads chunks can take it at its word. Of a chunk,
only the description is read, which tells where its values are.
"""

from __future__ import annotations

import io
import math
import pickle
import threading
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch
from typing_extensions import Self, override

from booster_checkpoint.files.byte_file import ByteFile
from booster_checkpoint.files.names import MODEL, OPTIMIZER
from booster_checkpoint.files.parts import MOST_DIMS, is_tiling, read_common
from booster_checkpoint.files.tensor_file import TensorFile
from booster_checkpoint.files.torch_file import UNREADABLE, first_line, load_plainly, offset_of
from booster_checkpoint.storage.open_file import RangeStream
from booster_core.errors import CheckpointAbsentError, CheckpointDamagedError, CheckpointError
from booster_core.state import Box, TensorMeta, box_numel, box_shape, encode_json, intersect, slices_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_checkpoint.storage import Location

METADATA = ".metadata"
_T = TypeVar("_T")
_LARGEST = 1 << 62
STATE, GROUPS, SHAPES, DTYPES = "state", "param_groups", "param_shapes", "param_dtypes"
"""The first parts of an optimizer's paths."""
_NESTED = {MODEL: ("model",), OPTIMIZER: ("optimizer", "optim")}
"""What the parts of a nested state are called."""
_MODULE = "torch.distributed.checkpoint.metadata"
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_INERT = {
    (_MODULE, "Metadata"),
    (_MODULE, "StorageMeta"),
    (_MODULE, "TensorStorageMetadata"),
    (_MODULE, "BytesStorageMetadata"),
    (_MODULE, "ChunkStorageMetadata"),
    (_MODULE, "TensorProperties"),
    (_MODULE, "MetadataIndex"),
    (_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
}
"""What a table may name, and gets an inert class for."""
_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}
"""What it gets Python's own for, which no file can change."""


class _Inert:
    """What stands for whatever a table names: it keeps what it is given, and does nothing."""

    __slots__ = ("state",)

    def __new__(cls, *arguments: object) -> Self:
        del arguments
        made = super().__new__(cls)
        made.state = None
        return made

    state: Any
    """Attributes; a tuple where the class has a state of its own form; ``None`` where it has none."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return an attribute; ``None`` where it is not set."""
        return self.state.get(name) if type(self.state) is dict else None


class _TableUnpickler(pickle._Unpickler):  # noqa: SLF001 - see the docstring
    """Unpickles the table without making anything of what it names.

    A list of allowed classes is not enough: a file can set attributes of an allowed class, and they stay changed for
    the whole process. So each class is a new one that does nothing. torch's own ``weights_only`` reads pickles of
    protocol 2, and DCP writes protocol 4. Python's unpickler in C takes tens of gigabytes for a damaged number.
    """

    # An array of bytes takes the memory that it claims before it is read, and no table has one.
    dispatch = {code: read for code, read in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}  # noqa: SLF001, RUF012 - as above

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _INERT:
            return type(name, (_Inert,), {"__slots__": ()})
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        msg = f"it refers to {module[:100]}.{name[:100]}"
        raise pickle.UnpicklingError(msg)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and the chunks that it consists of.

    Args:
        shape: Its shape.
        dtype: Its element type.
        chunks: Where in it its parts are. They fill it, and none of them overlap.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of a file.

    Args:
        file: The file's name.
        offset: Where the range begins, in bytes.
        length: Its size in bytes.
        extensions: What the writer put the bytes through.
    """

    file: str
    offset: int
    length: int
    extensions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """What a DCP folder holds.

    Args:
        tensors: Tensors by DCP's name.
        values: DCP's names of everything else.
        paths: For names of nested state the keys that lead to it.
        slices: Where each chunk is, by name and first indices; other values have none of these.
    """

    tensors: Mapping[str, TensorEntry]
    values: tuple[str, ...]
    paths: Mapping[str, tuple[str | int, ...]]
    slices: Mapping[tuple[str, tuple[int, ...] | None], Slice]


def read_table(folder: Location) -> Table:
    """Return the table of a DCP folder.

    Raises:
        CheckpointAbsentError: If there is none.
        CheckpointDamagedError: If it is damaged, or holds anything but a table.
        CheckpointUnreadableError, StorageUnreachableError: If its file cannot be read.
    """
    path = folder / METADATA
    pickled = path.read_bytes()
    if pickled is None:
        msg = f"There is no '{path}'."
        raise CheckpointAbsentError(msg)
    try:
        content = _TableUnpickler(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError as error:
        msg = f"'{path}' was not loaded: {error}, which a checkpoint's table never does. It is damaged or hostile."
        raise CheckpointDamagedError(msg) from error
    except (*UNREADABLE, OverflowError) as error:
        msg = f"'{path}' cannot be read: {error or type(error).__name__}. It is damaged or truncated."
        raise CheckpointDamagedError(msg) from error
    if not _is(content, "Metadata") or type(content.get("storage_data")) is not dict:
        msg = f"'{path}' is not the table of a `torch.distributed.checkpoint` folder."
        raise CheckpointDamagedError(msg)
    return _checked(content, path)


def _checked(content: _Inert, path: Location) -> Table:
    """Return the table, all of whose entries are of the right kind."""
    tensors: dict[str, TensorEntry] = {}
    values: list[str] = []
    paths: dict[str, tuple[str | int, ...]] = {}
    slices: dict[tuple[str, tuple[int, ...] | None], Slice] = {}
    name: Any = "state_dict_metadata"
    try:
        for name, entry in content.get("state_dict_metadata").items():
            if _is(entry, "BytesStorageMetadata"):
                values.append(_of(str, name))
            else:
                tensors[_of(str, name)] = _tensor(_named(entry, "TensorStorageMetadata"))
        planned = content.get("planner_data")
        for name, keys in planned.items() if type(planned) is dict else ():  # another planner's data is its own
            if not keys or not all(type(key) in (str, int) for key in _of(tuple, keys)):
                raise ValueError
            paths[_of(str, name)] = keys
        for index, place in content.get("storage_data").items():
            name, offset = _named(index, "MetadataIndex").get("fqn"), index.get("offset")
            slices[_of(str, name), None if offset is None else _numbers(offset)] = _slice(_named(place, "_StorageInfo"))
    except (AttributeError, TypeError, ValueError) as error:
        msg = f"The entry '{str(name)[:200]}' of the table '{path}' is malformed: it is damaged or hostile."
        raise CheckpointDamagedError(msg) from error
    return Table(tensors=tensors, values=tuple(values), paths=paths, slices=slices)


def _tensor(entry: _Inert) -> TensorEntry:
    properties = _named(entry.get("properties"), "TensorProperties")
    dtype = properties.state[0] if type(properties.state) is tuple and properties.state else properties.get("dtype")
    shape = _numbers(entry.get("size"))
    found = [_box(_named(chunk, "ChunkStorageMetadata"), shape) for chunk in _of(list, entry.get("chunks"))]
    chunks = tuple({tuple(first for first, _ in box): box for box in found}.values())
    if math.prod(shape) >= _LARGEST or not is_tiling(shape, chunks):
        raise ValueError
    return TensorEntry(shape, _of(torch.dtype, dtype), chunks)


def _box(chunk: _Inert, shape: tuple[int, ...]) -> Box:
    places = zip(_numbers(chunk.get("offsets")), _numbers(chunk.get("sizes")), shape, strict=True)
    box = tuple((offset, offset + size, whole) for offset, size, whole in places)
    if any(stop > whole for _, stop, whole in box):
        raise ValueError
    return tuple((start, stop) for start, stop, _ in box)


def _slice(place: _Inert) -> Slice:
    extensions = place.get("transform_descriptors") or []
    if type(extensions) not in (list, tuple):
        raise TypeError
    return Slice(
        _of(str, place.get("relative_path")),
        _number(place.get("offset")),
        _number(place.get("length")),
        tuple(_of(str, each) for each in extensions),
    )


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _Inert) and type(value).__name__ == kind


def _named(value: Any, kind: str) -> _Inert:
    if not _is(value, kind):
        raise TypeError
    return cast("_Inert", value)


def _of(kind: type[_T], value: Any) -> _T:
    if type(value) is not kind:
        raise TypeError
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list) or len(values) > MOST_DIMS:
        raise TypeError
    return tuple(map(_number, values))


def _number(value: Any) -> int:
    if not 0 <= _of(int, value) < _LARGEST:
        raise ValueError
    return int(value)


class DCPFile(TensorFile):
    """A DCP folder as one file of tensors. Nested dicts appear under their paths, joined as DCP joins them.

    An optimizer's state (``state``, ``param_groups`` at the top) appears as in our own optimizer files. Of a nested
    state (``{"model": ..., "optimizer": ...}``) only one part is shown, without its prefix.

    Args:
        path: The folder.
        kind: Which part: ``"model"`` or ``"optimizer"``.
        sizes: The sizes of its files, as far as they are known.

    Raises:
        CheckpointError: If the folder is damaged, incomplete, or uses extensions of its writer.
    """

    def __init__(self, path: Location, kind: str = MODEL, sizes: Mapping[str, int | None] | None = None) -> None:
        self.path = path
        self._table = read_table(path)
        self._paths = _paths_of(self._table, kind)
        self.tensors = {}
        self._fqns: dict[str, str] = {}
        self._files: dict[str, ByteFile] = {}
        self._chunks: dict[tuple[str, tuple[int, ...]], tuple[ByteFile, int]] = {}
        self._lock = threading.Lock()
        try:
            self._open_files(sizes or {})
            self._check_ends()
            for fqn, entry in self._table.tensors.items():
                if fqn not in self._paths:
                    continue
                parts = self._paths[fqn]
                key = f"{parts[1]}/{parts[2]}" if parts[0] == STATE and len(parts) == 3 else ".".join(map(str, parts))
                self._fqns[key] = fqn
                self.tensors[key] = TensorMeta(shape=entry.shape, dtype=entry.dtype)
            others = {self._paths[fqn]: self._read_value(fqn) for fqn in self._table.values if fqn in self._paths}
        except BaseException:
            self.close()
            raise
        is_optimizer = any(parts[0] == GROUPS for parts in others)
        self._inside: dict[str, torch.Tensor] = {}
        try:
            self.values = {"optimizer": _optimizer_info(others)} if is_optimizer else _encoded(others, self._inside)
        except (CheckpointError, ValueError) as error:
            self.close()
            msg = f"'{path}' cannot be read: {error}"
            raise CheckpointDamagedError(msg) from error
        for key, tensor in self._inside.items():
            self.tensors[key] = TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype)

    @override
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        if key in self._inside:
            out.view(box_shape(box)).copy_(self._inside[key][slices_of(box)])
            return
        fqn = self._fqns[key]
        meta = self.tensors[key]
        for place in self._table.tensors[fqn].chunks:
            if intersect(box, place) is not None:
                file, start = self._values_of(fqn, meta.dtype, place)
                read_common(
                    partial(file.read_box, start, box_shape(place), meta.dtype.itemsize), place, box, meta.dtype, out
                )

    @override
    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _open_files(self, sizes: Mapping[str, int | None]) -> None:
        names = dict.fromkeys(place.file for place in self._table.slices.values())
        for name in names:
            if "/" in name or name in ("", ".", "..") or "\0" in name:
                msg = (
                    f"The table in '{self.path}' names the file '{name}', which is not in its folder: damaged or "
                    "hostile."
                )
                raise CheckpointDamagedError(msg)
        for file in self.path.open_files({name: sizes.get(name) for name in names}):
            self._files[file.place.name] = ByteFile(file)

    def _check_ends(self) -> None:
        for (fqn, _), place in self._table.slices.items():
            if place.extensions:
                msg = f"'{fqn}' in '{self.path}' was written through an extension ({', '.join(place.extensions)})."
                raise CheckpointDamagedError(msg)
            size = self._files[place.file].size
            if place.offset + place.length > size:
                msg = (
                    f"'{fqn}' is at bytes {place.offset} to {place.offset + place.length} of "
                    f"'{self.path / place.file}', which has {size} bytes. It is truncated."
                )
                raise CheckpointDamagedError(msg)

    def _slice_of(self, fqn: str, first: tuple[int, ...] | None) -> tuple[ByteFile, Slice]:
        place = self._table.slices.get((fqn, first))
        if place is None:
            msg = f"The table in '{self.path}' does not say where '{fqn}' is: it is damaged."
            raise CheckpointDamagedError(msg)
        return self._files[place.file], place

    def _read_value(self, fqn: str) -> Any:
        file, info = self._slice_of(fqn, None)
        content = io.BytesIO(RangeStream(file, info.offset, info.length).read())
        try:
            value = load_plainly(content)
        except UNREADABLE as error:
            msg = (
                f"'{fqn}' in '{self.path}' was not loaded, because it is damaged or holds objects: {first_line(error)}"
            )
            raise CheckpointDamagedError(msg) from error
        return value

    def _values_of(self, fqn: str, dtype: torch.dtype, place: Box) -> tuple[ByteFile, int]:
        """Return file and position of a chunk's values."""
        key = tuple(first for first, _ in place)
        with self._lock:
            known = self._chunks.get((fqn, key))
            if known is None:
                known = self._chunks[fqn, key] = self._find_values(fqn, dtype, place, *self._slice_of(fqn, key))
            return known

    def _find_values(
        self, fqn: str, dtype: torch.dtype, place: Box, file: ByteFile, info: Slice
    ) -> tuple[ByteFile, int]:
        """Read the description of a chunk."""
        damaged = f"'{fqn}' in '{self.path}' is damaged: its chunk at {tuple(first for first, _ in place)}"
        try:
            stream = cast("IO[bytes]", RangeStream(file, info.offset, info.length))
            chunk = load_plainly(stream, describe=True)
            if not isinstance(chunk, torch.Tensor) or (chunk.numel(), chunk.dtype) != (box_numel(place), dtype):
                msg = f"{damaged} is not what the table says."
                raise CheckpointDamagedError(msg)
            start = info.offset + offset_of(chunk)
        except UNREADABLE as error:
            msg = f"{damaged} cannot be read: {first_line(error)}."
            raise CheckpointDamagedError(msg) from error
        if not chunk.is_contiguous() or start + chunk.numel() * chunk.element_size() > info.offset + info.length:
            msg = f"{damaged} has no values of its own."
            raise CheckpointDamagedError(msg)
        return file, start


def kinds_in(table: Table) -> list[str]:
    """Return what a DCP folder holds: ``"model"``, ``"optimizer"``, or both of them."""
    paths = _paths_of(table, OPTIMIZER)
    is_optimizer = any(path[0] == GROUPS for path in paths.values())
    if not is_optimizer:
        return [MODEL]
    return [MODEL] * any(fqn not in paths for fqn in _paths_of(table, MODEL)) + [OPTIMIZER]


def left_out_of(table: Table) -> list[str]:
    """Return what a nested state has besides a model and an optimizer, such as a scheduler, by its first keys."""
    shown = {fqn for kind in kinds_in(table) for fqn in _paths_of(table, kind)}
    return sorted({str(table.paths.get(fqn, (fqn,))[0]) for fqn in (*table.tensors, *table.values) if fqn not in shown})


def _paths_of(table: Table, kind: str) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each entry that belongs to a kind, without what is in front of all of them."""
    paths = {fqn: table.paths.get(fqn, (fqn,)) for fqn in (*table.tensors, *table.values)}
    front, other = (_front_of(paths, each) for each in (kind, OPTIMIZER if kind == MODEL else MODEL))
    if front:
        paths = {fqn: path[len(front) :] for fqn, path in paths.items() if path[: len(front)] == front != path}
    elif other:
        paths = {fqn: path for fqn, path in paths.items() if path[: len(other)] != other}
    return paths if kind == MODEL else {fqn: _unflattened(path) for fqn, path in paths.items()}


def _front_of(paths: Mapping[str, tuple[str | int, ...]], kind: str) -> tuple[str | int, ...]:
    """Return the keys under which a nested state has a model or an optimizer; none where it has none."""
    for depth in (1, 2):
        fronts = {path[:depth] for path in paths.values() if len(path) > depth and path[depth - 1] in _NESTED[kind]}
        if len(fronts) == 1:
            return fronts.pop()
    return ()


def _unflattened(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return the path of an optimizer's entry that ``flatten_optimizer_state_dict=True`` gave one name."""
    if len(path) == 1 and isinstance(path[0], str):
        front, _, rest = path[0].partition(".")
        name, dot, last = rest.rpartition(".")
        if front in (STATE, GROUPS) and dot:
            return front, name, last
    return path


def _encoded(others: dict[tuple[Any, ...], Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return a model's values that are not tensors, and put the tensors inside of them into ``tensors``."""
    named = {".".join(map(str, parts)): value for parts, value in others.items()}
    return {name: encode_json(value, name, tensors) for name, value in named.items()}


def _optimizer_info(others: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return the values of an optimizer's paths in the form of ``param_groups.json``."""
    groups: dict[int, dict[str, Any]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    facts: dict[str, Any] = {SHAPES: {}}
    flat: dict[str, dict[str, Any]] = {}
    for parts, value in others.items():
        if parts[0] == GROUPS and len(parts) == 3 and isinstance(parts[1], str) and not parts[1].isdecimal():
            flat.setdefault(parts[1], {})[str(parts[2])] = encode_json(value, str(parts[2]))
        elif parts[0] == GROUPS and len(parts) == 3:
            groups.setdefault(int(parts[1]), {})[str(parts[2])] = (
                value if parts[2] == "params" else encode_json(value, str(parts[2]))
            )
        elif parts[0] == STATE and len(parts) == 3:
            scalars.setdefault(str(parts[1]), {})[str(parts[2])] = encode_json(value, str(parts[2]))
        elif parts[0] in (SHAPES, DTYPES):
            facts[parts[0]] = value
    ordered = [groups[index] for index in sorted(groups)]
    for name, options in flat.items():  # parameters with equal options were one group
        alike = (group for group in ordered if {**options, "params": group["params"]} == group)
        group = next(alike, None)
        if group is None:
            ordered.append({**options, "params": [name]})
        else:
            group["params"].append(name)
    return {"format_version": 1, "param_groups": ordered, "scalars": scalars, **facts}
