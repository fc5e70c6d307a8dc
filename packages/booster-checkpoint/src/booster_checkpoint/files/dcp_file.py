"""Reads folders of ``torch.distributed.checkpoint`` (DCP) like any other file of tensors, in the parts that are needed.

DCP keeps each chunk of a tensor as a small ``torch.save`` file inside of a larger file, and a pickled table of chunks.
`booster_checkpoint.files.dcp_table` reads the table; of a chunk, only the description is read, which tells
where its values are.
"""

from __future__ import annotations

import io
import pickle
import threading
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from typing_extensions import override

from booster_checkpoint.files.byte_file import ByteFile
from booster_checkpoint.files.dcp_table import Slice, Table, read_table
from booster_checkpoint.files.names import MODEL, OPTIMIZER
from booster_checkpoint.files.parts import read_common
from booster_checkpoint.files.tensor_file import TensorFile
from booster_checkpoint.storage.range_stream import RangeStream
from booster_core.errors import CheckpointError
from booster_core.state import Box, TensorMeta, box_numel, box_shape, encode_json, intersect, slices_of

if TYPE_CHECKING:
    from pathlib import Path

STATE, GROUPS, SHAPES = "state", "param_groups", "param_shapes"
"""The first parts of an optimizer's paths."""
_NESTED = {MODEL: ("model",), OPTIMIZER: ("optimizer", "optim")}
"""What the parts of a nested state are called."""
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, AttributeError, LookupError)
"""What ``torch.load`` raises about content that it does not take."""


class DCPFile(TensorFile):
    """A DCP folder as one file of tensors. Nested dicts appear under their paths, joined as DCP joins them.

    An optimizer's state (``state``, ``param_groups`` at the top) appears as in our own optimizer files. Of a nested
    state (``{"model": ..., "optimizer": ...}``) only one part is shown, without its prefix.

    Args:
        path: The folder.
        kind: Which part: ``"model"`` or ``"optimizer"``.

    Raises:
        CheckpointError: If the folder is damaged, incomplete, or uses extensions of its writer.
    """

    def __init__(self, path: Path, kind: str = MODEL) -> None:
        self.path = path
        self._table = read_table(path)
        self._paths = _paths_of(self._table, kind)
        self.tensors = {}
        self._fqns: dict[str, str] = {}
        self._files: dict[str, ByteFile] = {}
        self._chunks: dict[tuple[str, tuple[int, ...]], tuple[ByteFile, int]] = {}
        self._lock = threading.Lock()
        try:
            self._check_files()
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
            raise CheckpointError(msg) from error
        for key, tensor in self._inside.items():
            self.tensors[key] = TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype)

    @override
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        if key in self._inside:
            out.view(box_shape(box)).copy_(self._inside[key][slices_of(box)])
            return
        fqn = self._fqns[key]
        meta = self.tensors[key]
        missing = box_numel(box)
        for chunk in self._table.tensors[fqn].chunks:
            place = tuple((o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            common = intersect(box, place)
            if common is None:
                continue
            missing -= box_numel(common)
            file, start = self._values_of(fqn, meta.dtype, place)
            read = partial(file.read_box, start, box_shape(place), meta.dtype.itemsize)
            read_common(read, place, box, meta.dtype, out)
        if missing:
            msg = f"'{self.path}' lacks {missing} of the {box_numel(box)} elements of '{key}' that were asked for."
            raise CheckpointError(msg)

    @override
    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _check_files(self) -> None:
        for (fqn, _), place in self._table.slices.items():
            name = place.file
            if "/" in name or name in ("", ".", "..") or "\0" in name:
                msg = (
                    f"The table in '{self.path}' names the file '{name}', which is not in its folder: damaged or "
                    "hostile."
                )
                raise CheckpointError(msg)
            if place.extensions:
                msg = f"'{fqn}' in '{self.path}' was written through an extension ({', '.join(place.extensions)})."
                raise CheckpointError(msg)
            if name not in self._files:
                self._files[name] = ByteFile(self.path / name)
            size = self._files[name].size
            if place.offset + place.length > size:
                msg = (
                    f"'{fqn}' is at bytes {place.offset} to {place.offset + place.length} of "
                    f"'{self.path / name}', "
                    f"which has {size} bytes. It is truncated."
                )
                raise CheckpointError(msg)

    def _slice_of(self, fqn: str, offset: tuple[int, ...] | None) -> tuple[ByteFile, Slice]:
        place = self._table.slices.get((fqn, offset))
        if place is None:
            msg = f"The table in '{self.path}' does not say where '{fqn}' is: it is damaged."
            raise CheckpointError(msg)
        return self._files[place.file], place

    def _read_value(self, fqn: str) -> Any:
        file, info = self._slice_of(fqn, None)
        content = io.BytesIO(RangeStream(file, info.offset, info.length).read())
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            msg = f"'{fqn}' in '{self.path}' was not loaded, because it is damaged or holds objects: {error}"
            raise CheckpointError(msg.splitlines()[0]) from error

    def _values_of(self, fqn: str, dtype: torch.dtype, place: Box) -> tuple[ByteFile, int]:
        """Return file and position of a chunk's values."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        offset = tuple(first for first, _ in place)
        with self._lock:
            known = self._chunks.get((fqn, offset))
            if known is not None:
                return known
            file, info = self._slice_of(fqn, offset)
            stream = RangeStream(file, info.offset, info.length)
            try:
                with FakeTensorMode():
                    chunk = torch.load(cast("IO[bytes]", stream), weights_only=True)
            except _UNREADABLE as error:
                msg = f"'{fqn}' in '{self.path}' is damaged: {(str(error) or type(error).__name__).splitlines()[0]}"
                raise CheckpointError(msg) from error
            if not isinstance(chunk, torch.Tensor) or (chunk.numel(), chunk.dtype) != (box_numel(place), dtype):
                msg = f"'{fqn}' in '{self.path}' is damaged: its chunk at {offset} is not what the table says."
                raise CheckpointError(msg)
            inside = chunk.untyped_storage()._checkpoint_offset  # noqa: SLF001 - torch documents no other way
            if inside is None:
                msg = f"'{fqn}' in '{self.path}' is damaged: its chunk at {offset} has no values."
                raise CheckpointError(msg)
            start = info.offset + int(inside) + int(chunk.storage_offset()) * chunk.element_size()
            if not chunk.is_contiguous() or start + chunk.numel() * chunk.element_size() > info.offset + info.length:
                msg = f"'{fqn}' in '{self.path}' is damaged: its chunk at {offset} is {chunk}."
                raise CheckpointError(msg)
            self._chunks[fqn, offset] = file, start
            return file, start


def _paths_of(table: Table, kind: str) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each entry that belongs to a kind, without what is in front of all of them."""
    paths = {fqn: table.paths.get(fqn, (fqn,)) for fqn in (*table.tensors, *table.values)}
    for depth in (1, 2):
        fronts = {path[:depth] for path in paths.values() if len(path) > depth and path[depth - 1] in _NESTED[kind]}
        if len(fronts) == 1:
            front = fronts.pop()
            paths = {fqn: path[depth:] for fqn, path in paths.items() if path[:depth] == front and len(path) > depth}
            break
    return paths if kind == MODEL else {fqn: _unflattened(path) for fqn, path in paths.items()}


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
    shapes: dict[str, Any] = {}
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
        elif parts[0] == SHAPES:
            shapes = value
    ordered = [groups[index] for index in sorted(groups)]
    for name, options in flat.items():  # parameters with equal options were one group
        alike = (group for group in ordered if {**options, "params": group["params"]} == group)
        group = next(alike, None)
        if group is None:
            ordered.append({**options, "params": [name]})
        else:
            group["params"].append(name)
    return {"format_version": 1, "param_groups": ordered, "scalars": scalars, "param_shapes": shapes}
