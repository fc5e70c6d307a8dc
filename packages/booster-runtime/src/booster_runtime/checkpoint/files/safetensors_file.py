"""Files in the safetensors format: an 8-byte length, a JSON header, and the tensors' values.

Written and read here instead of by the safetensors library because ranks write parts of one file side by side, and
because a header is checked in full before the first value is read.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import threading
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from booster_core.errors import CheckpointError
from booster_core.state import TensorMeta
from booster_runtime.checkpoint.files.formats import Container, TensorFile
from booster_runtime.checkpoint.files.names import SAFETENSORS
from booster_runtime.checkpoint.files.raw import as_bytes, pread_into, pwrite_from, read_strided
from booster_runtime.state.regions import is_contiguous, span_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from booster_core.state import Box
    from booster_runtime.checkpoint.files.layout import TensorSpec

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts."""
_LARGEST = 1 << 62
"""Torch's sizes are smaller than this."""
_METADATA = "__metadata__"
_VALUES = "booster."
"""Prefix of the metadata entries that hold values of ours."""


class SafetensorsContainer(Container):
    """Writes safetensors files."""

    suffix = SAFETENSORS

    @override
    def create(self, path: Path, specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> None:
        head, size = _head(specs, values)
        descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        try:
            pwrite_from(descriptor, memoryview(head), 0)
            os.ftruncate(descriptor, len(head) + size)
        finally:
            os.close(descriptor)

    @override
    def offsets(self, path: Path, specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> dict[str, int]:
        del path
        offset = len(_head(specs, values)[0])
        offsets = {}
        for spec in specs:
            offsets[spec.key] = offset
            offset += spec.nbytes
        return offsets


def _head(specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return length and header as bytes, and the size of the values that follow."""
    metadata = {"format": "pt", **{_VALUES + name: json.dumps(value) for name, value in values.items()}}
    header: dict[str, Any] = {_METADATA: metadata}
    offset = 0
    for spec in specs:
        if spec.dtype not in DTYPE_NAMES:
            msg = (
                f"'{spec.key}' has dtype {spec.dtype}, which safetensors files cannot hold. Use "
                "`use_safetensors=False`."
            )
            raise CheckpointError(msg)
        header[spec.key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        msg = (
            f"The names of {len(specs)} tensors and {len(values)} other values make a header of {len(text)} bytes; a "
            f"safetensors file takes {_MAX_HEADER_BYTES}. Use `shard=True` or a smaller `size_per_shard`."
        )
        raise CheckpointError(msg)
    return struct.pack("<Q", len(text)) + text, offset


class SafetensorsFile(TensorFile):
    """Reads a safetensors file: whole tensors and rows by plain reads, columns through a mapping.

    Args:
        path: The file.
        in_memory: Read all values at once, on first use.

    Raises:
        CheckpointError: If the file is truncated, its header is damaged, or its tensors overlap or leave the file.
    """

    def __init__(self, path: Path, *, in_memory: bool = False) -> None:
        self.path = path
        self._descriptor = _open(path)
        try:
            self._size = os.fstat(self._descriptor).st_size
            header, self._start = self._read_header()
            metadata = header.pop(_METADATA, {})
            self.values = _values_in(path, metadata)
            self._offsets: dict[str, int] = {}
            self.tensors = {key: self._check_entry(key, entry) for key, entry in header.items()}
            self._check_overlaps()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._in_memory = in_memory
        self._content: torch.Tensor | None = None
        self._lock = threading.Lock()

    @override
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        meta, offset = self.tensors[key], self._offsets[key]
        itemsize = meta.dtype.itemsize
        if self._in_memory:
            content = self._whole()
            whole = content[offset - self._start : offset - self._start + math.prod(meta.shape) * itemsize]
            read_strided(as_bytes(whole), 0, meta.shape, itemsize, box, out)
        elif is_contiguous(meta.shape, box):
            first = offset + span_of(meta.shape, box)[0] * itemsize
            pread_into(self._descriptor, as_bytes(out), first, self.path)
        else:
            read_strided(self._descriptor, offset, meta.shape, itemsize, box, out)

    @override
    def close(self) -> None:
        os.close(self._descriptor)
        self._content = None

    def _whole(self) -> torch.Tensor:
        with self._lock:
            if self._content is None:
                self._content = torch.empty(self._size - self._start, dtype=torch.uint8)
                pread_into(self._descriptor, as_bytes(self._content), self._start, self.path)
        return self._content

    def _read_header(self) -> tuple[dict[str, Any], int]:
        head = os.pread(self._descriptor, _LENGTH_BYTES, 0)
        if len(head) < _LENGTH_BYTES:
            msg = (
                f"'{self.path}' has {self._size} bytes: too few for a safetensors file. It is truncated or another "
                "kind of file."
            )
            raise CheckpointError(msg)
        length = struct.unpack("<Q", head)[0]
        if length > min(self._size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            msg = (
                f"'{self.path}' announces a header of {length} bytes, but has {self._size} bytes. It is truncated, or "
                "not "
                "a safetensors file."
            )
            raise CheckpointError(msg)
        try:
            text = os.pread(self._descriptor, length, _LENGTH_BYTES).decode()
            header = json.loads(text, object_pairs_hook=_refuse_duplicates)
        except (ValueError, RecursionError) as error:
            msg = f"The header of '{self.path}' is damaged: {error}."
            raise CheckpointError(msg) from error
        if not isinstance(header, dict):
            msg = f"The header of '{self.path}' is damaged: it is not a JSON object."
            raise CheckpointError(msg)
        return header, _LENGTH_BYTES + length

    def _check_entry(self, key: str, entry: Any) -> TensorMeta:
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, begin, end)
            if type(dtype) is not str or not all(type(number) is int and 0 <= number < _LARGEST for number in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError) as error:
            msg = f"The header of '{self.path}' is damaged: the entry of '{key}' is {_shown(entry)}."
            raise CheckpointError(msg) from error
        if dtype not in _DTYPES:
            msg = f"'{key}' in '{self.path}' has dtype {dtype}; known are {', '.join(_DTYPES)}."
            raise CheckpointError(msg)
        meta = TensorMeta(shape=shape, dtype=_DTYPES[dtype])
        nbytes = math.prod(shape) * meta.dtype.itemsize
        available = self._size - self._start
        if begin > end or end > available:
            msg = (
                f"'{key}' in '{self.path}' is at bytes {begin} to {end} of its values, but the file has {available}. "
                "It is truncated or damaged."
            )
            raise CheckpointError(msg)
        if end - begin != nbytes:
            msg = (
                f"'{key}' in '{self.path}' has {end - begin} bytes, but shape {shape} of {dtype} takes {nbytes}: "
                "damaged."
            )
            raise CheckpointError(msg)
        self._offsets[key] = self._start + begin
        return meta

    def _check_overlaps(self) -> None:
        ranges = sorted(
            (self._offsets[key], self._offsets[key] + math.prod(meta.shape) * meta.dtype.itemsize, key)
            for key, meta in self.tensors.items()
            if math.prod(meta.shape)
        )
        for (_, end, key), (begin, _, other) in itertools.pairwise(ranges):
            if begin < end:
                msg = f"The header of '{self.path}' is damaged: '{key}' and '{other}' share bytes."
                raise CheckpointError(msg)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        msg = f"'{path}' cannot be read: {error.strerror or error}."
        raise CheckpointError(msg) from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        msg = "a name occurs twice"
        raise ValueError(msg)
    return content


def _shown(value: Any) -> str:
    """Return the beginning of a value's text, for a message."""
    try:
        return str(value)[:200]
    except (RecursionError, ValueError):  # nested too deeply, or with too many digits
        return f"a {type(value).__name__}"


def _values_in(path: Path, metadata: Any) -> dict[str, Any]:
    """Return our values among the metadata."""
    if not isinstance(metadata, dict):
        msg = f"The header of '{path}' is damaged: its metadata is {_shown(metadata)}."
        raise CheckpointError(msg)
    values = {}
    for name, text in metadata.items():
        if name.startswith(_VALUES):
            try:
                values[name.removeprefix(_VALUES)] = json.loads(text)
            except (TypeError, ValueError, RecursionError) as error:
                msg = f"The header of '{path}' is damaged: its entry '{name}' is not JSON ({error})."
                raise CheckpointError(msg) from error
    return values
