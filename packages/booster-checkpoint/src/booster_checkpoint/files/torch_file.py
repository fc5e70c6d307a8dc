"""Files made by ``torch.save``: written like any other file, read without running what they hold.

``torch.save`` can leave the tensors' values out and keep their room, so ranks fill it in side by side. The checksums
of the zip records with values are left at zero: torch does not look at them, general zip tools complain. Reading
accepts plain data only (``weights_only=True``).
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import tempfile
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from typing_extensions import override

from booster_checkpoint.files.byte_file import ByteFile
from booster_checkpoint.files.frame import FileFrame
from booster_checkpoint.files.pickle_check import PickleGrowsError, check_pickle
from booster_checkpoint.files.tensor_file import TensorFile
from booster_core.errors import CheckpointDamagedError, CheckpointError
from booster_core.state import TensorMeta, box_shape, decode_json, encode_json, slices_of, tensor_references

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from booster_checkpoint.files.frame import TensorSpec
    from booster_checkpoint.storage import OpenFile
    from booster_core.state import Box

_LEGACY_PICKLES = 5
"""How many pickles torch wrote before the values until version 1.6: magic number, version, system, content, keys."""
_DAMAGED = (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError, struct.error)
"""What torch raises about content that it does not take, besides an ``UnpicklingError``."""


def torch_frame(name: str, specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> FileFrame:
    """Return the frame of the file that ``torch.save`` of a plain dict writes.

    It is read from a local file in which the values are a hole, so that it takes little space.

    Args:
        name: The file's name, which torch writes into it.
        specs: The tensors, in the order of their values.
        values: Other entries of the dict: encoded JSON (`booster_core.state.json_values`) by name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # what skip_data's documentation builds on

    with tempfile.TemporaryDirectory(prefix="booster-") as folder:
        path = Path(folder) / name
        with FakeTensorMode():
            tensors = {spec.key: torch.empty(spec.shape, dtype=spec.dtype) for spec in specs}
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(_content(tensors, values), path)
        with path.open("rb") as stream:
            content = _described(stream)
        saved: dict[str, torch.Tensor] = {}
        for entry, value in content.items():
            encode_json(value, entry, saved)
        offsets = {spec.key: offset_of(saved[spec.key]) for spec in specs}
        nbytes = path.stat().st_size
        pieces, begin = [], 0
        ends = sorted((offsets[spec.key], offsets[spec.key] + spec.nbytes) for spec in specs if spec.nbytes)
        with path.open("rb") as stream:
            for start, stop in (*ends, (nbytes, nbytes)):
                if begin < start:
                    stream.seek(begin)
                    pieces.append((begin, stream.read(start - begin)))
                begin = stop
    return FileFrame(nbytes=nbytes, offsets=offsets, pieces=tuple(pieces))


def _content(tensors: dict[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict to save: tensors that belong to a value are inside of it."""
    decoded = {name: decode_json(value, tensors) for name, value in values.items()}
    inside = {key for value in values.values() for key in tensor_references(value)}
    return {**{key: tensor for key, tensor in tensors.items() if key not in inside}, **decoded}


class TorchFile(TensorFile):
    """Reads a file made by ``torch.save`` of a dict of tensors.

    Like any other file, it is read in parts: torch tells the offset of a tensor's values. A file from before torch
    1.6, or one with views that leave out or repeat values, is read as a whole instead.

    Args:
        file: The open file, which is closed with this one, or if this fails.
        in_memory: Read all values at once.

    Raises:
        CheckpointDamagedError: If it is damaged, holds something else, or holds objects that would have to be
            executed to be read.
    """

    def __init__(self, file: OpenFile, *, in_memory: bool = False) -> None:
        self.path = file.place
        self._bytes: ByteFile | None = None
        self._offsets: dict[str, int] = {}
        self._orders: dict[str, tuple[int, ...] | None] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        try:
            if in_memory or not _is_zip(file) or not self._describe(file):
                self._collect(_load(file, describe=False))
        finally:
            if self._bytes is None:
                file.close()

    def _describe(self, file: OpenFile) -> bool:
        """Find out where the tensors' values are; return whether they can be read from there."""
        self._collect(_load(file, describe=True))
        try:
            self._offsets = {name: offset_of(tensor) for name, tensor in self._tensors.items()}
        except ValueError as error:
            msg = f"'{self.path}' is damaged or hostile: {error}."
            raise CheckpointDamagedError(msg) from error
        self._orders = {name: _order_of(tensor) for name, tensor in self._tensors.items()}
        if None in self._orders.values():
            return False
        self._check_sizes(file.size)
        self._bytes = ByteFile(file)
        return True

    @override
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        meta = self.tensors[key]
        if self._bytes is None:
            out.view(box_shape(box)).copy_(self._tensors[key].detach()[slices_of(box)])
        else:
            order = self._orders[key]
            assert order is not None, "else the file was read as a whole"
            shape, stored = tuple(meta.shape[dim] for dim in order), tuple(box[dim] for dim in order)
            is_plain = order == tuple(range(len(order)))
            values = out if is_plain else torch.empty_like(out)
            self._bytes.read_box(self._offsets[key], shape, meta.dtype.itemsize, stored, values)
            if not is_plain:
                there = [order.index(dim) for dim in range(len(order))]
                out.view(box_shape(box)).copy_(values.view(box_shape(stored)).permute(there))

    @override
    def place_of(self, key: str) -> tuple[ByteFile, int] | None:
        is_plain = self._bytes is not None and self._orders[key] == tuple(range(len(self.tensors[key].shape)))
        return (self._bytes, self._offsets[key]) if is_plain and self._bytes is not None else None

    @override
    def close(self) -> None:
        self._tensors = {}
        if self._bytes is not None:
            self._bytes.close()
            self._bytes = None

    def _collect(self, content: Any) -> None:
        """Sort what the file holds into tensors and other values."""
        if not isinstance(content, dict):
            msg = f"'{self.path}' holds a {type(content).__name__}; a checkpoint is a dict from names to tensors."
            raise CheckpointDamagedError(msg)
        self._tensors = {}
        self.values = {}
        for name, value in content.items():
            try:
                encoded = encode_json(value, str(name), self._tensors)
            except (CheckpointError, *_DAMAGED) as error:
                msg = f"'{self.path}' holds a value that cannot be read: {first_line(error)}"
                raise CheckpointDamagedError(msg) from error
            if not isinstance(value, torch.Tensor):
                self.values[str(name)] = encoded
        for name, tensor in self._tensors.items():
            if tensor.layout != torch.strided or tensor.is_quantized or (tensor.is_meta and _offset(tensor) is None):
                msg = f"'{name}' in '{self.path}' is not a plain tensor ({tensor.layout}, {tensor.dtype})."
                raise CheckpointDamagedError(msg)
        self.tensors = {
            name: TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in self._tensors.items()
        }

    def _check_sizes(self, size: int) -> None:
        for name, meta in self.tensors.items():
            nbytes = math.prod(meta.shape) * meta.dtype.itemsize
            if nbytes and self._offsets[name] + nbytes > size:
                msg = (
                    f"'{name}' is beyond the end of '{self.path}', which has {size} bytes. It is truncated or damaged."
                )
                raise CheckpointDamagedError(msg)


def offset_of(tensor: torch.Tensor) -> int:
    """Return where in the file the values of a tensor begin, which was loaded as a description only.

    Raises:
        ValueError: If they are not in the file: it told torch to make a tensor of its own.
    """
    offset = _offset(tensor)
    if offset is None:
        msg = "it has a tensor without values"
        raise ValueError(msg)
    return offset + int(tensor.storage_offset()) * tensor.element_size()


def _offset(tensor: torch.Tensor) -> int | None:
    """Return where in the file a tensor's storage begins, if it was loaded as a description."""
    # torch's documentation of skip_data names this attribute, and no other way to the offsets.
    return tensor.untyped_storage()._checkpoint_offset  # noqa: SLF001


def _described(stream: IO[bytes]) -> Any:
    """Return what ``torch.load`` finds in a stream, with tensors that have an offset in place of values."""
    if _tells_offsets_on_meta():
        return torch.load(stream, map_location="meta", weights_only=True)
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes fifty times as long

    with FakeTensorMode():
        return torch.load(stream, weights_only=True)


@functools.cache
def _tells_offsets_on_meta() -> bool:
    """Return whether this torch loads to the device ``meta`` without reading values, as older ones do not."""
    stream = io.BytesIO()
    torch.save(torch.zeros(1), stream)
    stream.seek(0)
    return _offset(torch.load(stream, map_location="meta", weights_only=True)) is not None


def _is_zip(file: OpenFile) -> bool:
    return file.stream().read(2) == b"PK"


def load_plainly(stream: IO[bytes], *, describe: bool = False) -> Any:
    """Return what ``torch.load`` finds in a stream: plain data, in work and memory that its size bounds.

    Args:
        stream: It begins where the stream is.
        describe: Leave the tensors' values out.

    Raises:
        pickle.UnpicklingError: If it holds objects, or is made to take for ever.
        EOFError, LookupError, RuntimeError, ValueError, TypeError, AttributeError, struct.error: If it is damaged.
    """
    start = stream.tell()
    is_zip = stream.read(2) == b"PK"
    stream.seek(start)
    if is_zip:
        # The same reader that torch.load uses, so that what is checked is what is loaded.
        content = torch._C.PyTorchFileReader(stream).get_record("data.pkl")  # noqa: SLF001
        check_pickle(io.BytesIO(content), len(content))
    else:
        nbytes = stream.seek(0, io.SEEK_END) - start
        stream.seek(start)
        for _ in range(_LEGACY_PICKLES):
            check_pickle(stream, nbytes)
    stream.seek(start)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # which it then reads, or refuses
        if describe:
            return _described(stream)
        return torch.load(stream, map_location="cpu", weights_only=True)


def _order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return a tensor's dimensions in the order of its values in memory, ``(1, 0)`` for a transposed matrix.

    ``None`` if the tensor leaves out or repeats values.
    """
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def _load(file: OpenFile, *, describe: bool) -> Any:
    """Return the content of a file, read or described (tensors without values)."""
    path = file.place
    try:
        return load_plainly(file.stream(), describe=describe)
    except PickleGrowsError as error:
        msg = f"'{path}' was not loaded: {error}. It is damaged or hostile."
        raise CheckpointDamagedError(msg) from error
    except pickle.UnpicklingError as error:
        msg = (
            f"'{path}' holds more than tensors and plain values, and was not loaded: reading such a file can run any "
            f"program. Convert it where you trust it. ({first_line(error)})"
        )
        raise CheckpointDamagedError(msg) from error
    except _DAMAGED as error:
        msg = f"'{path}' cannot be read: {first_line(error)}. It is damaged, truncated or another kind of file."
        raise CheckpointDamagedError(msg) from error


def first_line(error: BaseException) -> str:
    """Return the beginning of what an error says; torch's own texts are of many lines."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]
