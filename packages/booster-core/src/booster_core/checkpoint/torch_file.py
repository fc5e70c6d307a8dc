"""Files made by ``torch.save``: written in place like any other container, read without running what they hold.

``torch.save`` can leave the tensors' values out and keep their room, so ranks fill it in side by side. The checksums
of the zip records with values are left at zero: torch does not look at them, general zip tools complain. Reading maps
the file and accepts plain data only (``weights_only=True``).
"""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from booster_core.checkpoint.formats import Container, TensorFile
from booster_core.checkpoint.naming import TORCH
from booster_core.errors import CheckpointError
from booster_core.state.adapter import TensorMeta
from booster_core.state.jsonable import decode, encode, tensor_references
from booster_core.state.regions import slices_of
from booster_core.state.shard import box_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from booster_core.checkpoint.plan import TensorSpec
    from booster_core.state.shard import Box


class TorchContainer(Container):
    """Writes what ``torch.save`` of a plain dict writes; values that are not tensors are entries of that dict."""

    suffix = TORCH

    @override
    def create(self, path: Path, specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # what skip_data's documentation builds on

        with FakeTensorMode():
            tensors = {spec.key: torch.empty(spec.shape, dtype=spec.dtype) for spec in specs}
            content = _content(tensors, values)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(content, path)

    @override
    def offsets(self, path: Path, specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> dict[str, int]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            content = torch.load(path, weights_only=True)
        tensors: dict[str, torch.Tensor] = {}
        for name, value in content.items():
            encode(value, name, tensors)
        del values
        # torch's documentation of skip_data names this attribute, and no other way to the offsets.
        offsets = {spec.key: tensors[spec.key].untyped_storage()._checkpoint_offset for spec in specs}  # noqa: SLF001
        return {key: int(offset or 0) for key, offset in offsets.items()}


def _content(tensors: dict[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict to save: tensors that belong to a value are inside of it."""
    decoded = {name: decode(value, tensors) for name, value in values.items()}
    inside = {key for value in values.values() for key in tensor_references(value)}
    return {**{key: tensor for key, tensor in tensors.items() if key not in inside}, **decoded}


class TorchFile(TensorFile):
    """Reads a file made by ``torch.save`` of a dict of tensors.

    Args:
        path: The file. One from before torch 1.6 is read as a whole, because it cannot be mapped.
        in_memory: Read all values at once.

    Raises:
        CheckpointError: If the file is damaged, holds something else, or holds objects that would have to be
            executed to be read.
    """

    def __init__(self, path: Path, *, in_memory: bool = False) -> None:
        self.path = path
        content = _load(path, in_memory=in_memory)
        if not isinstance(content, dict):
            msg = f"'{path}' holds a {type(content).__name__}; a checkpoint is a dict from names to tensors."
            raise CheckpointError(msg)
        self._tensors: dict[str, torch.Tensor] = {}
        self.values = {}
        for name, value in content.items():
            encoded = encode(value, str(name), self._tensors)
            if not isinstance(value, torch.Tensor):
                self.values[str(name)] = encoded
        for name, tensor in self._tensors.items():
            if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
                msg = f"'{name}' in '{path}' is not a plain tensor ({tensor.layout}, {tensor.device}, {tensor.dtype})."
                raise CheckpointError(msg)
        self.tensors = {
            name: TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in self._tensors.items()
        }

    @override
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        out.view(box_shape(box)).copy_(self._tensors[key].detach()[slices_of(box)])

    @override
    def close(self) -> None:
        self._tensors = {}


def _load(path: Path, *, in_memory: bool) -> Any:
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # which it then reads, or refuses
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip and not in_memory)
    except pickle.UnpicklingError as error:
        msg = (
            f"'{path}' holds more than tensors and plain values, and was not loaded: reading such a file can run any "
            f"program. Convert it where you trust it. ({str(error).splitlines()[0][:300]})"
        )
        raise CheckpointError(msg) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        msg = f"'{path}' cannot be read: {reason}. It is damaged, truncated or another kind of file."
        raise CheckpointError(msg) from error
