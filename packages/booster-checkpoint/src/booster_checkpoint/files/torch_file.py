"""Files made by ``torch.save``: written like any other file, read by torch without running what they hold.

``torch.save`` can leave the tensors' values out and keep their room, so ranks fill it in side by side. The checksums
of the zip records with values are left at zero: torch does not look at them, general zip tools complain. Reading
accepts plain data only (``weights_only=True``); a file on a disk is mapped, one at a URL is in memory as a whole.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import tempfile
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from typing_extensions import override

from booster_checkpoint.files.names import SAFETENSORS
from booster_checkpoint.files.tensor_file import FileLayout, TensorFile
from booster_checkpoint.storage import LocalLocation
from booster_core.errors import CheckpointDamagedError, CheckpointError
from booster_core.state import TensorMeta, box_shape, decode_json, encode_json, slices_of, tensor_references

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from booster_checkpoint.files.tensor_file import TensorSpec
    from booster_checkpoint.storage import OpenFile
    from booster_core.state import Box

UNREADABLE = (
    *(pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError),
    *(TypeError, AttributeError, MemoryError, struct.error),
)
"""What torch raises about content that it does not take."""


def torch_frame(name: str, specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> FileLayout:
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
            content = load_plainly(stream, describe=True)
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
    return FileLayout(nbytes=nbytes, offsets=offsets, pieces=tuple(pieces))


def _content(tensors: dict[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict to save: tensors that belong to a value are inside of it."""
    decoded = {name: decode_json(value, tensors) for name, value in values.items()}
    inside = {key for value in values.values() for key in tensor_references(value)}
    return {**{key: tensor for key, tensor in tensors.items() if key not in inside}, **decoded}


class TorchFile(TensorFile):
    """Reads a file made by ``torch.save`` of a dict of tensors.

    Args:
        file: The open file, which is closed when all that it holds is known.

    Raises:
        CheckpointDamagedError: If it is damaged, holds something else, or holds objects that would have to be
            executed to be read.
    """

    def __init__(self, file: OpenFile) -> None:
        self.path = file.place
        self._tensors: dict[str, torch.Tensor] = {}
        self.values = {}
        try:
            content = _load(file)
        finally:
            file.close()
        if not isinstance(content, dict):
            msg = f"'{self.path}' holds a {type(content).__name__}; a checkpoint is a dict from names to tensors."
            raise CheckpointDamagedError(msg)
        for name, value in content.items():
            try:
                encoded = encode_json(value, str(name), self._tensors)
            except (CheckpointError, *UNREADABLE) as error:
                msg = f"'{self.path}' holds a value that cannot be read: {first_line(error)}"
                raise CheckpointDamagedError(msg) from error
            if not isinstance(value, torch.Tensor):
                self.values[str(name)] = encoded
        for name, tensor in self._tensors.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                msg = f"'{name}' in '{self.path}' is not a plain tensor ({tensor.layout}, {tensor.dtype})."
                raise CheckpointDamagedError(msg)
        self.tensors = {
            name: TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in self._tensors.items()
        }

    @override
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        out.view(box_shape(box)).copy_(self._tensors[key].detach()[slices_of(box)])

    @override
    def close(self) -> None:
        self._tensors = {}


def offset_of(tensor: torch.Tensor) -> int:
    """Return where in the file the values of a tensor begin, which was loaded as a description only.

    Raises:
        ValueError: If they are not in the file: it told torch to make a tensor of its own.
    """
    # torch's documentation of skip_data names this attribute, and no other way to the offsets.
    offset = tensor.untyped_storage()._checkpoint_offset  # noqa: SLF001
    if offset is None:
        msg = "it has a tensor without values"
        raise ValueError(msg)
    return int(offset) + int(tensor.storage_offset()) * tensor.element_size()


def load_plainly(source: Path | IO[bytes], *, is_mapped: bool = False, describe: bool = False) -> Any:
    """Return what ``torch.load`` finds: tensors and plain values.

    Args:
        source: A file, or a stream that begins where it is.
        is_mapped: Leave the tensors' values in the file, which is not a stream.
        describe: Leave the tensors' values out; `offset_of` tells where they are.

    Raises:
        pickle.UnpicklingError: If it holds objects.
        RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError, MemoryError, struct.error: If it is
            damaged.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # which it then reads, or refuses
        if describe and not _tells_offsets_on_meta():
            from torch._subclasses.fake_tensor import FakeTensorMode  # takes fifty times as long

            with FakeTensorMode():
                return torch.load(source, weights_only=True)
        where = "meta" if describe else "cpu"
        return torch.load(source, map_location=where, weights_only=True, mmap=is_mapped or None)


@functools.cache
def _tells_offsets_on_meta() -> bool:
    """Return whether this torch loads to the device ``meta`` without reading values, as older ones do not."""
    stream = io.BytesIO()
    torch.save(torch.zeros(1), stream)
    stream.seek(0)
    loaded = torch.load(stream, map_location="meta", weights_only=True)
    return loaded.untyped_storage()._checkpoint_offset is not None  # noqa: SLF001


def _load(file: OpenFile) -> Any:
    """Return the content of a file."""
    path = file.place
    try:
        # By its name, torch would read another kind; it can't map what it wrote before version 1.6.
        can_map = path.suffix != SAFETENSORS and file.stream().read(2) == b"PK"
        if isinstance(path, LocalLocation) and can_map:
            content = load_plainly(path.path, is_mapped=True)
        else:
            content = load_plainly(file.stream())
    except pickle.UnpicklingError as error:
        msg = (
            f"'{path}' holds more than tensors and plain values, and was not loaded: reading such a file can run any "
            f"program. Convert it where you trust it. ({first_line(error)})"
        )
        raise CheckpointDamagedError(msg) from error
    except UNREADABLE as error:
        msg = f"'{path}' cannot be read: {first_line(error)}. It is damaged, truncated or another kind of file."
        raise CheckpointDamagedError(msg) from error
    return content


def first_line(error: BaseException) -> str:
    """Return the beginning of what an error says; torch's own texts are of many lines."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]
