"""The table of a DCP folder: which tensors and values there are, and in which file, at which offset, their chunks are.

Every entry is checked here, so that what reads chunks can take the table at its word.
"""

from __future__ import annotations

import math
import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster_checkpoint.files.dcp_pickle import Record, load_plain
from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

METADATA = ".metadata"
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor.

    Args:
        offsets: Its first index in each dimension.
        sizes: Its shape.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and the chunks that it consists of.

    Args:
        shape: Its shape.
        dtype: Its element type.
        chunks: Its parts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


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
        slices: Where each chunk is, by name and offsets; other values have no offsets.
    """

    tensors: Mapping[str, TensorEntry]
    values: tuple[str, ...]
    paths: Mapping[str, tuple[str | int, ...]]
    slices: Mapping[tuple[str, tuple[int, ...] | None], Slice]


def read_table(folder: Path) -> Table:
    """Return the table of a DCP folder.

    Raises:
        CheckpointError: If it is damaged, or holds anything but a table.
    """
    path = folder / METADATA
    try:
        content = load_plain(path.read_bytes())
    except pickle.UnpicklingError as error:
        msg = f"'{path}' was not loaded: {error}, which a checkpoint's table never does. It is damaged or hostile."
        raise CheckpointError(msg) from error
    except (OSError, EOFError, ValueError, TypeError, LookupError, struct.error, MemoryError) as error:
        msg = f"'{path}' cannot be read: {error or type(error).__name__}. It is damaged or truncated."
        raise CheckpointError(msg) from error
    if not _is(content, "Metadata") or type(content.get("storage_data")) is not dict:
        msg = f"'{path}' is not the table of a `torch.distributed.checkpoint` folder."
        raise CheckpointError(msg)
    return _checked(content, path)


def _checked(content: Record, path: Path) -> Table:
    """Return the table that a record describes, all of whose entries are of the right kind."""
    tensors: dict[str, TensorEntry] = {}
    values: list[str] = []
    paths: dict[str, tuple[str | int, ...]] = {}
    slices: dict[tuple[str, tuple[int, ...] | None], Slice] = {}
    name: object = "state_dict_metadata"
    try:
        for name, entry in _items(content.get("state_dict_metadata")):
            if _is(entry, "BytesStorageMetadata"):
                values.append(_text(name))
            else:
                tensors[_text(name)] = _tensor(entry)
        planned = content.get("planner_data")
        if type(planned) is dict:  # another planner's data is its own
            for name, keys in planned.items():
                paths[_text(name)] = _keys(keys)
        for name, place in _items(content.get("storage_data")):
            if type(name) is not tuple:
                raise _MalformedError
            slices[name] = _slice(place)
    except _MalformedError as error:
        msg = f"The entry '{str(name)[:200]}' of the table '{path}' is malformed: it is damaged or hostile."
        raise CheckpointError(msg) from error
    return Table(tensors=tensors, values=tuple(values), paths=paths, slices=slices)


class _MalformedError(Exception):
    """An entry is not what DCP writes."""


def _is(value: Any, kind: str) -> bool:
    return type(value) is Record and value.kind == kind


def _items(value: Any) -> Any:
    if type(value) is not dict:
        raise _MalformedError
    return value.items()


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _MalformedError
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise _MalformedError
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list):
        raise _MalformedError
    return tuple(map(_number, values))


def _keys(keys: Any) -> tuple[str | int, ...]:
    if type(keys) is not tuple or not keys or not all(type(key) in (str, int) for key in keys):
        raise _MalformedError
    return keys


def _tensor(entry: Any) -> TensorEntry:
    if not _is(entry, "TensorStorageMetadata") or not _is(entry.get("properties"), "TensorProperties"):
        raise _MalformedError
    properties = entry.get("properties")
    dtype = properties.state[0] if type(properties.state) is tuple and properties.state else properties.get("dtype")
    shape, chunks = _numbers(entry.get("size")), entry.get("chunks")
    if type(dtype) is not torch.dtype or math.prod(shape) >= _LARGEST or type(chunks) is not list:
        raise _MalformedError
    return TensorEntry(shape, dtype, tuple(_chunk(chunk, shape) for chunk in chunks))


def _chunk(chunk: Any, shape: tuple[int, ...]) -> Chunk:
    if not _is(chunk, "ChunkStorageMetadata"):
        raise _MalformedError
    offsets, sizes = _numbers(chunk.get("offsets")), _numbers(chunk.get("sizes"))
    if not len(offsets) == len(sizes) == len(shape):
        raise _MalformedError
    if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise _MalformedError
    return Chunk(offsets, sizes)


def _slice(place: Any) -> Slice:
    if not _is(place, "_StorageInfo"):
        raise _MalformedError
    extensions = place.get("transform_descriptors") or []
    if type(extensions) not in (list, tuple):
        raise _MalformedError
    return Slice(
        _text(place.get("relative_path")),
        _number(place.get("offset")),
        _number(place.get("length")),
        tuple(map(_text, extensions)),
    )
