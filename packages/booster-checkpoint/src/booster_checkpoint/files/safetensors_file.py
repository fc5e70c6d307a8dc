"""Files in the safetensors format: an 8-byte length, a JSON header, and the tensors' values.

Framed and read here instead of by the safetensors library because ranks write parts of one file side by side, and
because a header is checked in full before the first value is read.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from booster_checkpoint.files.byte_file import ByteFile
from booster_checkpoint.files.parts import MOST_DIMS
from booster_checkpoint.files.tensor_file import FileLayout, TensorFile
from booster_core.errors import CheckpointDamagedError, CheckpointError
from booster_core.state import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.files.tensor_file import TensorSpec
    from booster_checkpoint.storage import Location, OpenFile
    from booster_core.state import Box

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
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts."""
_LARGEST = 1 << 62
"""Torch's sizes are smaller than this."""
METADATA = "__metadata__"
VALUES_PREFIX = "booster."
"""Prefix of the metadata entries that hold values of ours."""


def safetensors_frame(specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> FileLayout:
    """Return the frame of a safetensors file: the header's length and the header.

    Args:
        specs: The tensors, in the order of their values.
        values: Encoded JSON, which goes into the header's metadata.

    Raises:
        CheckpointError: If the format cannot hold a dtype, or the header is longer than its library reads.
    """
    metadata = {"format": "pt", **{VALUES_PREFIX + name: json.dumps(value) for name, value in values.items()}}
    header: dict[str, Any] = {METADATA: metadata}
    places, used = dict[str, int](), 0
    for spec in specs:
        if spec.dtype not in DTYPE_NAMES:
            msg = (
                f"'{spec.key}' has dtype {spec.dtype}, which safetensors files cannot hold. Use "
                "`use_safetensors=False`."
            )
            raise CheckpointError(msg)
        places[spec.key] = used
        header[spec.key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [used, used + spec.nbytes],
        }
        used += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        msg = (
            f"The names of {len(specs)} tensors and {len(values)} other values make a header of {len(text)} bytes; a "
            f"safetensors file takes {MAX_HEADER_BYTES}. Use `shard=True` or a smaller `size_per_shard`."
        )
        raise CheckpointError(msg)
    head = struct.pack("<Q", len(text)) + text
    offsets = {key: len(head) + place for key, place in places.items()}
    return FileLayout(nbytes=len(head) + used, offsets=offsets, pieces=((0, head),))


class SafetensorsFile(TensorFile):
    """Reads a safetensors file, in the parts that are asked for.

    Args:
        file: The open file, which is closed with this one, or if this fails.
        checks: Verifies what is read.

    Attributes:
        metadata: The entry ``__metadata__`` of the header: text by name, unchecked.

    Raises:
        CheckpointDamagedError: If the file is truncated, its header is damaged, or its tensors overlap or leave it.
    """

    def __init__(self, file: OpenFile, checks: CheckedReads | None = None) -> None:
        self.path = file.place
        self._bytes = ByteFile(file, checks)
        try:
            self._size = self._bytes.size
            header, self._start = self._read_header()
            metadata = header.pop(METADATA, None)
            self.metadata: Mapping[str, Any] = {} if metadata is None else metadata
            self.values = {} if metadata is None else _values_in(self.path, metadata)
            self._offsets: dict[str, int] = {}
            self.tensors = {key: self._check_entry(key, entry) for key, entry in header.items()}
            self._check_overlaps()
        except BaseException:
            self._bytes.close()
            raise

    @override
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        meta, offset = self.tensors[key], self._offsets[key]
        self._bytes.read_box(offset, meta.shape, meta.dtype.itemsize, box, out)

    def place_of(self, key: str) -> tuple[ByteFile, int] | None:
        return self._bytes, self._offsets[key]

    @override
    def close(self) -> None:
        self._bytes.close()

    def _read_header(self) -> tuple[dict[str, Any], int]:
        head = bytearray(LENGTH_BYTES)
        if self._size >= LENGTH_BYTES:
            self._bytes.read_into(memoryview(head), 0)
        else:
            msg = (
                f"'{self.path}' has {self._size} bytes: too few for a safetensors file. It is truncated or another "
                "kind of file."
            )
            raise CheckpointDamagedError(msg)
        length = struct.unpack("<Q", head)[0]
        if length > min(self._size - LENGTH_BYTES, MAX_HEADER_BYTES):
            msg = (
                f"'{self.path}' announces a header of {length} bytes, but has {self._size} bytes. It is truncated, or "
                "not "
                "a safetensors file."
            )
            raise CheckpointDamagedError(msg)
        text = bytearray(length)
        self._bytes.read_into(memoryview(text), LENGTH_BYTES)
        try:
            header = json.loads(text.decode(), object_pairs_hook=_refuse_duplicates)
        except (ValueError, RecursionError) as error:
            msg = f"The header of '{self.path}' is damaged: {error}."
            raise CheckpointDamagedError(msg) from error
        if not isinstance(header, dict):
            msg = f"The header of '{self.path}' is damaged: it is not a JSON object."
            raise CheckpointDamagedError(msg)
        return header, LENGTH_BYTES + length

    def _check_entry(self, key: str, entry: Any) -> TensorMeta:
        try:
            dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
            if (type(dtype), type(shape), type(offsets)) != (str, list, list) or len(shape) > MOST_DIMS:
                raise TypeError
            begin, end = offsets
            if not all(type(number) is int and 0 <= number < _LARGEST for number in (*shape, begin, end)):
                raise ValueError
            shape = tuple(shape)
        except (KeyError, TypeError, ValueError) as error:
            msg = f"The header of '{self.path}' is damaged: the entry of '{key}' is {_shown(entry)}."
            raise CheckpointDamagedError(msg) from error
        if dtype not in _DTYPES:
            msg = f"'{key}' in '{self.path}' has dtype {dtype[:100]}; known are {', '.join(_DTYPES)}."
            raise CheckpointDamagedError(msg)
        meta = TensorMeta(shape=shape, dtype=_DTYPES[dtype])
        nbytes = math.prod(shape) * meta.dtype.itemsize
        available = self._size - self._start
        if begin > end or end > available:
            msg = (
                f"'{key}' in '{self.path}' is at bytes {begin} to {end} of its values, but the file has {available}. "
                "It is truncated or damaged."
            )
            raise CheckpointDamagedError(msg)
        if end - begin != nbytes:
            msg = (
                f"'{key}' in '{self.path}' has {end - begin} bytes, but shape {shape} of {dtype} takes {nbytes}: "
                "damaged."
            )
            raise CheckpointDamagedError(msg)
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
                raise CheckpointDamagedError(msg)


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


def _values_in(path: Location, metadata: Any) -> dict[str, Any]:
    """Return our values among the metadata."""
    if not isinstance(metadata, dict):
        msg = f"The header of '{path}' is damaged: its metadata is {_shown(metadata)}."
        raise CheckpointDamagedError(msg)
    values = {}
    for name, text in metadata.items():
        if name.startswith(VALUES_PREFIX):
            try:
                values[name.removeprefix(VALUES_PREFIX)] = json.loads(text)
            except (TypeError, ValueError, RecursionError) as error:
                msg = f"The header of '{path}' is damaged: its entry '{name}' is not JSON ({error})."
                raise CheckpointDamagedError(msg) from error
    return values


def open_tensor_file(file: OpenFile, checks: CheckedReads | None = None) -> TensorFile:
    """Read the directory of a file of tensors of either kind; the kind is told by its content, not by its name.

    Args:
        file: The open file, which is closed with the result, or if this fails.
        checks: Verifies what is read; of a safetensors file only.

    Raises:
        CheckpointError: If it cannot be read, is damaged, or is refused for what it holds.
    """
    try:
        start = file.stream().read(9)
    except BaseException:
        file.close()
        raise
    # A zip (torch.save) or a bare pickle (torch.save before 1.6) begins like this; a safetensors header's length never
    # does, because it would be more than the format allows. A length that looks like a pickle has a JSON object after
    # it.
    is_pickle = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    if (start[:4] == b"PK\x03\x04" or is_pickle) and start[8:] != b"{":
        from booster_checkpoint.files.torch_file import TorchFile

        return TorchFile(file)
    return SafetensorsFile(file, checks)


def is_low_bit(dtype: torch.dtype) -> bool:
    """Return whether a tensor of this format may hold quantized weights."""
    return (dtype.itemsize == 1 and dtype != torch.bool) or dtype in (torch.int16, torch.int32)


def holds_low_bits(module: nn.Module | None) -> bool:
    """Return whether a model's own weights are quantized, so that it takes those of files as they are."""
    parameters = () if module is None else module.parameters()
    return any(is_low_bit(each.dtype) or hasattr(each, "quant_state") for each in parameters)
