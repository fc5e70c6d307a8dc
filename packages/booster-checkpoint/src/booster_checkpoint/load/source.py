"""A checkpoint as one namespace of tensors, whatever files it consists of.

`Source` finds out which files at a path are the checkpoint, and opens them. In a folder that holds
several forms, the first of these wins: ``model.safetensors``, ``model.safetensors.index.json``,
``pytorch_model.bin``, ``pytorch_model.bin.index.json``, the same four with ``diffusion_pytorch_model``, as in Hugging
Face libraries; then, where there is exactly one, the same with a prefix; then a complete set of numbered files
without an index; then a lone file. A folder of ``torch.distributed.checkpoint``, or one into which each rank wrote its
own part, is read as one file.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.names import (
    DIFFUSERS,
    INTERRUPTED,
    MODEL,
    OPTIMIZER,
    SAFETENSORS,
    TORCH,
    TORCH_MODEL,
    FileNames,
    mark_of,
    rank_shards_among,
    read_index,
)
from booster_checkpoint.files.safetensors_file import is_low_bit, open_tensor_file
from booster_checkpoint.files.tensor_file import read_whole
from booster_checkpoint.storage import Location, locate
from booster_core.errors import CheckpointAbsentError, CheckpointDamagedError, CheckpointError, shorten
from booster_core.state import decode_extra_state, parse_json, tensor_references

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch

    from booster_checkpoint.files.byte_file import ByteFile
    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.files.quantized import QuantizedWeight
    from booster_checkpoint.files.tensor_file import TensorFile
    from booster_core.state import Box, TensorMeta

_CANDIDATES = {
    MODEL: (
        FileNames(base=MODEL),
        FileNames(base=TORCH_MODEL, suffix=TORCH),
        FileNames(base=DIFFUSERS),
        FileNames(base=DIFFUSERS, suffix=TORCH),
    ),
    OPTIMIZER: (FileNames(base=OPTIMIZER), FileNames(base=OPTIMIZER, suffix=TORCH)),
}
_DCP_TABLE = ".metadata"
_FORMS = "a .safetensors or .bin file, or a folder with such files"


@dataclass(frozen=True)
class _Found:
    """The files that are a checkpoint.

    Args:
        files: For each file's name the tensors that an index expects in it; ``None`` without an index.
        index: The index' name.
    """

    files: Mapping[str, set[str] | None]
    index: str | None = None

    @classmethod
    def one(cls, name: str) -> _Found:
        """Return a checkpoint that is one file."""
        return cls({name: None})


def is_dcp_folder(path: Path | Location) -> bool:
    """Whether a folder was written by ``torch.distributed.checkpoint``."""
    return (locate(path) / _DCP_TABLE).size() is not None


def _find(folder: Location, kind: str, listed: Mapping[str, int | None]) -> _Found:
    """Return the files of the checkpoint in a folder.

    Args:
        folder: The folder.
        kind: ``"model"`` or ``"optimizer"``.
        listed: What it holds; see `Location.children`.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is not clear which one is meant.
    """
    names = [name for name, size in listed.items() if size is not None]
    for candidate in _CANDIDATES[kind]:
        if candidate.single in names:
            _refuse_marks(folder, {candidate.mark} & set(names))
            return _Found.one(candidate.single)
        if candidate.index in names:
            return _from_index(folder, candidate.index, names)
    _refuse_marks(folder, [name for name in names if name.endswith(INTERRUPTED) and not _is_other_kind(name[1:], kind)])
    for find in (_prefixed, _numbered, _lone):
        found = find(folder, kind, names)
        if found is not None:
            return found
    below = [name for name, size in listed.items() if size is None]
    tables = folder.sizes([f"{name}/{_DCP_TABLE}" for name in below])
    folders = [name for name, size in zip(below, tables, strict=True) if size is not None]
    if folders:
        msg = (
            f"The folder '{folder}' holds no {kind} checkpoint itself, but folders of torch.distributed.checkpoint: "
            f"{shorten(folders)}. Pass the path of the one that is meant."
        )
        raise CheckpointAbsentError(msg)
    shown = ", ".join(names[:10]) or "nothing"
    msg = f"The folder '{folder}' holds no {kind} checkpoint; it holds {shown}. Expected {_FORMS}."
    raise CheckpointAbsentError(msg)


def _hint_of_hub(path: str) -> str:
    """Return what to pass where a path that does not exist looks like a model id of the Hub."""
    given = os.path.relpath(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", given) is None or Path(given).parent.exists():
        return ""
    return f" If '{given}' is a repository of the Hub, pass 'hf://{given}'."


def _rank_shards(folder: Location, kind: str, listed: Mapping[str, int | None]) -> list[str]:
    """Return the files of a folder that ranks wrote for themselves.

    Raises:
        CheckpointError: If there is a whole model beside them.
    """
    if kind != MODEL:
        return []
    names = [name for name, size in listed.items() if size is not None]
    shards = rank_shards_among(names)
    whole = [name for each in _CANDIDATES[kind] for name in (each.single, each.index) if name in names]
    if shards and whole:
        msg = (
            f"The folder '{folder}' holds a whole model ('{whole[0]}') and files that each rank wrote for itself "
            f"({shorten(shards)}), which may be of two saves. Pass the path of '{whole[0]}', or move it to another "
            "folder to load the ranks' files."
        )
        raise CheckpointError(msg)
    return shards


def _refuse_marks(folder: Location, marks: Collection[str]) -> None:
    """Raise where marks say that files may be of two saves."""
    for mark in sorted(marks):
        msg = (
            f"A save into '{folder}' was interrupted while it replaced an older checkpoint ('{mark}' is left), so "
            "its files may be of two different saves. Save again, or load another checkpoint."
        )
        raise CheckpointError(msg)


def _from_index(folder: Location, index: str, names: Collection[str]) -> _Found:
    _refuse_marks(folder, {mark_of(index)} & set(names))
    files: dict[str, set[str] | None] = {}
    for key, name in read_index(folder / index).items():
        expected = files.setdefault(name, set())
        assert expected is not None, "made above"
        expected.add(key)
    absent = [name for name in files if name not in names]
    if absent:
        msg = f"The index '{folder / index}' names {len(absent)} files that are not there: {shorten(absent)}."
        raise CheckpointDamagedError(msg)
    return _Found(files, index)


def _is_other_kind(name: str, kind: str) -> bool:
    return name.startswith(OPTIMIZER) != (kind == OPTIMIZER)


def _prefixed(folder: Location, kind: str, names: list[str]) -> _Found | None:
    """Find the only checkpoint whose file names carry a prefix."""
    bases = {names.base for names in _CANDIDATES[kind]}
    indices = [name for name in names if re.fullmatch(r"\w+\.(safetensors|bin)\.(index\.\S+|\S+\.index)\.json", name)]
    indices = [name for name in indices if name.split(".")[0] in bases]
    singles = [name for name in names if re.fullmatch(r"\w+\.\S+\.(safetensors|bin)", name)]
    singles = [name for name in singles if name.split(".")[0] in bases and not re.search(r"-\d{5,}-of-\d{5,}\.", name)]
    found = indices + singles
    if len(found) > 1:
        msg = f"The folder '{folder}' holds several {kind} checkpoints: {shorten(found)}. Pass the path of one of them."
        raise CheckpointError(msg)
    if not found:
        return None
    return _from_index(folder, found[0], names) if indices else _Found.one(found[0])


def _numbered(folder: Location, kind: str, names: list[str]) -> _Found | None:
    """Find a complete set of numbered files without an index."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.+)-(\d{5,})-of-(\d{5,})(\.safetensors|\.bin)", name)
        if match and not _is_other_kind(name, kind):
            stem, number, total, suffix = match.groups()
            sets.setdefault((stem, total, suffix), set()).add(int(number))
    if len(sets) > 1:
        described = [f"{stem}-*-of-{total}{suffix}" for stem, total, suffix in sorted(sets)]
        msg = (
            f"The folder '{folder}' holds several sets of files, and no index that says which belong together: "
            f"{shorten(described)}. Move those that are not meant to another folder."
        )
        raise CheckpointError(msg)
    for (stem, total, suffix), numbers in sets.items():
        absent = sorted(set(range(1, int(total) + 1)) - numbers)
        if absent:
            files = [f"{stem}-{number:05d}-of-{total}{suffix}" for number in absent[:20]]
            msg = (
                f"The folder '{folder}' has no index, and lacks {len(absent)} of {int(total)} files: {shorten(files)}."
            )
            raise CheckpointDamagedError(msg)
        return _Found({f"{stem}-{number:05d}-of-{total}{suffix}": None for number in sorted(numbers)})
    return None


def _lone(folder: Location, kind: str, names: list[str]) -> _Found | None:
    for suffix in (SAFETENSORS, TORCH):
        found = [name for name in names if name.endswith(suffix) and not _is_other_kind(name, kind)]
        if len(found) > 1:
            msg = f"The folder '{folder}' holds several {kind} files: {shorten(found)}. Pass the path of one of them."
            raise CheckpointError(msg)
        if found:
            return _Found.one(found[0])
    return None


class Source:
    """The tensors of one checkpoint, read in parts from whichever file holds them.

    Args:
        path: A file, an index, or a folder.
        kind: ``"model"`` or ``"optimizer"``.
        checks: Returns what verifies a file while it is read, by its path.
        listed: What the folder holds, where that is known; see `Location.children`. It is not listed then.

    Raises:
        CheckpointError: If there is no checkpoint, or any of its files is damaged or not what the index says.
    """

    def __init__(
        self,
        path: Path | str | Location,
        kind: str,
        *,
        checks: Callable[[Location], CheckedReads | None] = lambda _: None,
        listed: Mapping[str, int | None] | None = None,
    ) -> None:
        self.path = locate(path)
        self._files: list[TensorFile] = []
        self._home: dict[str, TensorFile] = {}
        self._weights: dict[str, QuantizedWeight] = {}
        self.tensors: dict[str, TensorMeta] = {}
        self.values: dict[str, Any] = {}
        self.index: Location | None = None
        self._is_folder = False
        try:
            self._open(kind, listed, checks)
        except BaseException:
            self.close()
            raise

    def _open(
        self,
        kind: str,
        listed: Mapping[str, int | None] | None,
        checks: Callable[[Location], CheckedReads | None],
    ) -> None:
        folder, size = self.path, self.path.size() if listed is None else None
        if size is not None:
            folder, listed = self.path.parent, {self.path.name: size}
            found = _Found.one(self.path.name)
            if self.path.name.endswith(".json"):
                listed = folder.children()
                found = _from_index(folder, self.path.name, listed)
        else:
            self._is_folder = True
            listed = folder.children() if listed is None else listed
            if not listed and not folder.is_folder():
                of_hub = _hint_of_hub(str(self.path)) if kind == "model" else ""
                msg = f"There is no {kind} checkpoint at '{self.path}'. Expected {_FORMS}.{of_hub}"
                raise CheckpointAbsentError(msg)
            if listed.get(_DCP_TABLE) is not None:
                from booster_checkpoint.files.dcp import DCPFile

                self._add(DCPFile(folder, kind, listed), None)
                return
            shards = _rank_shards(folder, kind, listed)
            if shards:
                from booster_checkpoint.files.rank_shards import RankShards

                sizes = {name: listed[name] for name in shards}
                self._add(RankShards(folder, sizes, checks), None)
                return
            found = _find(folder, kind, listed)
        self.index = None if found.index is None else folder / found.index
        opened = folder.open_files({name: listed.get(name) for name in found.files})
        for file, expected in zip(opened, found.files.values(), strict=True):
            self._add(open_tensor_file(file, checks(file.place)), expected)

    @property
    def groups_path(self) -> Location | None:
        """Where an optimizer's parameter groups are, if its files are in a folder with an index."""
        if self.index is None:
            return self.path / "param_groups.json" if self._is_folder else None
        prefix = self.index.name.removesuffix(".json").partition(".index")[2].removeprefix(".")
        return self.index.parent / FileNames(base=OPTIMIZER, prefix=prefix or None).groups

    def _add(self, file: TensorFile, expected: set[str] | None) -> None:
        self._files.append(file)
        absent = sorted((expected or set()) - file.tensors.keys() - file.values.keys())
        if absent:
            msg = (
                f"The index '{self.index}' expects {len(absent)} tensors in '{file.path.name}' that it lacks: "
                f"{shorten(absent)}."
            )
            raise CheckpointDamagedError(msg)
        for key, meta in file.tensors.items():
            if key in self._home and expected is None:
                msg = f"'{key}' is in two files of '{self.path}': '{self._home[key].path.name}' and '{file.path.name}'."
                raise CheckpointError(msg)
            if expected is None or key in expected or key not in self._home:
                self._home[key] = file
                self.tensors[key] = meta
        self.values.update(_checked_values(file))

    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor into ``out``; see `TensorFile.read`."""
        weight = self._weights.get(key)
        if weight is None:
            self._home[key].read(key, box, out)
        else:
            weight.read(lambda stored, part, values: self._home[stored].read(stored, part, values), box, out)

    def place_of(self, key: str) -> tuple[ByteFile, int] | None:
        """Return where a tensor is read from; see `TensorFile.place_of`."""
        return None if key in self._weights else self._home[key].place_of(key)

    def home_of(self, key: str) -> Location:
        """Return the file that holds a tensor."""
        return self._home[self._weights[key].key if key in self._weights else key].path

    def dequantize(self) -> None:
        """Let weights in 8 or 4 bits be tensors of the fp32 values that they stand for, and their scales be none.

        Raises:
            CheckpointError: If they are in a form that can't be read.
        """
        if not any(is_low_bit(meta.dtype) for meta in self.tensors.values()):
            return  # before another file is read
        from booster_checkpoint.files.quantized import find_weights

        place = (self.path if self._is_folder else self.path.parent) / "config.json"
        written = place.read_bytes()
        config = None if written is None else parse_json(written, str(place))
        self._weights, left_out = find_weights(self.path, self.tensors, config)
        kept = {key: meta for key, meta in self.tensors.items() if key not in left_out}
        self.tensors = kept | {name: weight.meta for name, weight in self._weights.items()}

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.close()
        self._files = []

    def read_whole(self, key: str) -> torch.Tensor:
        """Return all of a (small) tensor."""
        return read_whole(self.tensors[key], lambda box, out: self.read(key, box, out))

    def extra_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the extra state of modules, decoded, as far as it is there.

        Args:
            names: Names of extra state (``layer._extra_state``).
        """
        return decode_extra_state(names, self.values, self.tensors, self.read_whole)


def _checked_values(file: TensorFile) -> Mapping[str, Any]:
    """Return a file's values, once it is known that the tensors in them go by names.

    Raises:
        CheckpointError: If one is nested too deeply, or refers to something else.
    """
    try:
        references = [key for value in file.values.values() for key in tensor_references(value)]
    except RecursionError as error:
        msg = f"A value in '{file.path}' is nested too deeply: it is damaged or hostile."
        raise CheckpointDamagedError(msg) from error
    if not all(isinstance(key, str) for key in references):
        msg = f"A value in '{file.path}' refers to a tensor by something else than its name: it is damaged or hostile."
        raise CheckpointDamagedError(msg)
    return file.values


@contextmanager
def open_source(
    path: Path | str | Location,
    kind: str,
    *,
    checks: Callable[[Location], CheckedReads | None] = lambda _: None,
    listed: Mapping[str, int | None] | None = None,
    dequantized: bool = False,
) -> Iterator[Source]:
    """Open a checkpoint for the body, in any of its forms, also with `Source.dequantize`; see `Source`."""
    source = Source(path, kind, checks=checks, listed=listed)
    try:
        if dequantized:
            source.dequantize()
        yield source
    finally:
        source.close()
