"""A checkpoint as one namespace of tensors, whatever files it consists of.

`find_files` tells which files at a path are the checkpoint; `Source` opens them. In a folder that holds
several forms, the first of these wins: ``model.safetensors``, ``model.safetensors.index.json``,
``pytorch_model.bin``, ``pytorch_model.bin.index.json``, as in Hugging Face libraries; then, where there is exactly
one, the same with a prefix; then a complete set of numbered files without an index; then a lone file. A folder of
``torch.distributed.checkpoint``, or one into which each rank wrote its own part, is read as one file.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.index import read_index
from booster_checkpoint.files.layout import (
    INTERRUPTED,
    MODEL,
    OPTIMIZER,
    SAFETENSORS,
    TORCH,
    TORCH_MODEL,
    FileNames,
    mark_of,
)
from booster_checkpoint.files.opening import open_tensor_file
from booster_checkpoint.files.rank_shards import RankShards, rank_shards_among
from booster_checkpoint.files.reading import read_whole
from booster_checkpoint.storage import RemotePath, read_heads
from booster_core.errors import CheckpointError, shorten
from booster_core.state import decode_extra_state, tensor_references

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.files.reading import ByteFile, TensorFile
    from booster_core.state import Box, TensorMeta

_CANDIDATES = {
    MODEL: (FileNames(base=MODEL), FileNames(base=TORCH_MODEL, suffix=TORCH)),
    OPTIMIZER: (FileNames(base=OPTIMIZER), FileNames(base=OPTIMIZER, suffix=TORCH)),
}
_FORMS = "a .safetensors or .bin file, or a folder with such files"


def is_dcp_folder(path: Path) -> bool:
    """Whether a folder was written by ``torch.distributed.checkpoint``."""
    return (path / ".metadata").is_file()


def find_files(path: Path, kind: str) -> tuple[dict[Path, set[str] | None], Path | None]:
    """Return the files of the checkpoint at a path.

    Args:
        path: A file, an index, or a folder.
        kind: ``"model"`` or ``"optimizer"``.

    Returns:
        For each file the tensors that an index expects in it (``None`` without an index); and the index.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is not clear which one is meant.
    """
    if not path.exists():
        msg = f"There is no {kind} checkpoint at '{path}'. Expected {_FORMS}."
        raise CheckpointError(msg)
    if path.is_file():
        return _from_index(path) if path.name.endswith(".json") else ({path: None}, None)
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    for candidate in _CANDIDATES[kind]:
        if candidate.single in names:
            _refuse_marks(path, {candidate.mark} & set(names))
            return {path / candidate.single: None}, None
        if candidate.index in names:
            return _from_index(path / candidate.index)
    _refuse_marks(path, [name for name in names if name.endswith(INTERRUPTED) and not _is_other_kind(name[1:], kind)])
    for find in (_prefixed, _numbered, _lone):
        found = find(path, kind, names)
        if found is not None:
            return found
    shown = ", ".join(names[:10]) or "nothing"
    folders = [entry.name for entry in path.iterdir() if is_dcp_folder(entry)]
    if folders:
        msg = (
            f"The folder '{path}' holds no {kind} checkpoint itself, but folders of torch.distributed.checkpoint: "
            f"{shorten(sorted(folders))}. Pass the path of the one that is meant."
        )
        raise CheckpointError(msg)
    msg = f"The folder '{path}' holds no {kind} checkpoint; it holds {shown}. Expected {_FORMS}."
    raise CheckpointError(msg)


def _rank_shards(path: Path, kind: str) -> list[str]:
    """Return the files of a folder that ranks wrote for themselves.

    Raises:
        CheckpointError: If there is a whole model beside them.
    """
    if kind != MODEL or not path.is_dir():
        return []
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    shards = rank_shards_among(names)
    whole = [name for each in _CANDIDATES[kind] for name in (each.single, each.index) if name in names]
    if shards and whole:
        msg = (
            f"The folder '{path}' holds a whole model ('{whole[0]}') and files that each rank wrote for itself "
            f"({shorten(shards)}), which may be of two saves. Pass the path of '{whole[0]}', or move it to another "
            "folder to load the ranks' files."
        )
        raise CheckpointError(msg)
    if shards:
        read_heads([path / name for name in shards])
    return shards


def _refuse_marks(folder: Path, marks: Collection[str]) -> None:
    """Raise where marks say that files may be of two saves."""
    for mark in sorted(marks):
        msg = (
            f"A save into '{folder}' was interrupted while it replaced an older checkpoint ('{mark}' is left), so "
            "its files may be of two different saves. Save again, or load another checkpoint."
        )
        raise CheckpointError(msg)


def _from_index(path: Path) -> tuple[dict[Path, set[str] | None], Path]:
    mark = path.with_name(mark_of(path.name))
    _refuse_marks(path.parent, [mark.name] if mark.exists() else [])
    files: dict[Path, set[str] | None] = {}
    for key, name in read_index(path).items():
        expected = files.setdefault(path.parent / name, set())
        assert expected is not None, "made above"
        expected.add(key)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        msg = f"The index '{path}' names {len(absent)} files that are not there: {shorten(absent)}."
        raise CheckpointError(msg)
    return files, path


def _is_other_kind(name: str, kind: str) -> bool:
    return name.startswith(OPTIMIZER) != (kind == OPTIMIZER)


def _prefixed(folder: Path, kind: str, names: list[str]) -> tuple[dict[Path, set[str] | None], Path | None] | None:
    """Find the only checkpoint whose file names carry a prefix."""
    bases = {names.base for names in _CANDIDATES[kind]}
    indices = [name for name in names if re.fullmatch(r"\w+\.(safetensors|bin)\.index\.\S+\.json", name)]
    indices = [name for name in indices if name.split(".")[0] in bases]
    singles = [name for name in names if re.fullmatch(r"\w+\.\S+\.(safetensors|bin)", name)]
    singles = [name for name in singles if name.split(".")[0] in bases and not re.search(r"-\d{5,}-of-\d{5,}\.", name)]
    found = indices + singles
    if len(found) > 1:
        msg = f"The folder '{folder}' holds several {kind} checkpoints: {shorten(found)}. Pass the path of one of them."
        raise CheckpointError(msg)
    if not found:
        return None
    return _from_index(folder / found[0]) if indices else ({folder / found[0]: None}, None)


def _numbered(folder: Path, kind: str, names: list[str]) -> tuple[dict[Path, set[str] | None], Path | None] | None:
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
            raise CheckpointError(msg)
        return {folder / f"{stem}-{number:05d}-of-{total}{suffix}": None for number in sorted(numbers)}, None
    return None


def _lone(folder: Path, kind: str, names: list[str]) -> tuple[dict[Path, set[str] | None], Path | None] | None:
    for suffix in (SAFETENSORS, TORCH):
        found = [name for name in names if name.endswith(suffix) and not _is_other_kind(name, kind)]
        if len(found) > 1:
            msg = f"The folder '{folder}' holds several {kind} files: {shorten(found)}. Pass the path of one of them."
            raise CheckpointError(msg)
        if found:
            return {folder / found[0]: None}, None
    return None


class Source:
    """The tensors of one checkpoint, read in parts from whichever file holds them.

    Args:
        path: A file, an index, or a folder.
        kind: ``"model"`` or ``"optimizer"``.
        in_memory: Read each file as a whole, once, instead of the parts that are asked for.
        checks: Returns what verifies a file while it is read, by its path.

    Raises:
        CheckpointError: If there is no checkpoint, or any of its files is damaged or not what the index says.
    """

    def __init__(
        self,
        path: Path | str,
        kind: str,
        *,
        in_memory: bool = False,
        checks: Callable[[Path], CheckedReads | None] = lambda _: None,
    ) -> None:
        self.path = path if isinstance(path, Path | RemotePath) else Path(path)
        self._files: list[TensorFile] = []
        self._home: dict[str, TensorFile] = {}
        self.tensors: dict[str, TensorMeta] = {}
        self.values: dict[str, Any] = {}
        self.index: Path | None = None
        try:
            if is_dcp_folder(self.path):
                from booster_checkpoint.files.dcp import DCPFile

                self._add(DCPFile(self.path, kind), None)
                return
            shards = _rank_shards(self.path, kind)
            if shards:
                self._add(RankShards(self.path, shards, in_memory=in_memory, checks=checks), None)
                return
            found, self.index = find_files(self.path, kind)
            read_heads(found)
            for file_path, expected in found.items():
                self._add(open_tensor_file(file_path, in_memory=in_memory, checks=checks(file_path)), expected)
        except BaseException:
            self.close()
            raise

    def take_turns(self, turn: int, num_turns: int) -> None:
        """Verify what other ranks of this host that read the same do not; see `CheckedReads.take_turns`."""
        for file in self._files:
            file.take_turns(turn, num_turns)

    @property
    def total_bytes(self) -> int:
        """Size of all tensors' values."""
        return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in self.tensors.values())

    @property
    def groups_path(self) -> Path | None:
        """The path of an optimizer's parameter groups, if its files are in a folder with an index."""
        if self.index is None:
            return self.path / "param_groups.json" if self.path.is_dir() else None
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
            raise CheckpointError(msg)
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
        self._home[key].read(key, box, out)

    def place_of(self, key: str) -> tuple[ByteFile, int] | None:
        """Return where a tensor is read from; see `TensorFile.place_of`."""
        return self._home[key].place_of(key)

    def home_of(self, key: str) -> Path:
        """Return the file that holds a tensor."""
        return self._home[key].path

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
        raise CheckpointError(msg) from error
    if not all(isinstance(key, str) for key in references):
        msg = f"A value in '{file.path}' refers to a tensor by something else than its name: it is damaged or hostile."
        raise CheckpointError(msg)
    return file.values


@contextmanager
def open_source(
    path: Path,
    kind: str,
    *,
    in_memory: bool = False,
    checks: Callable[[Path], CheckedReads | None] = lambda _: None,
) -> Iterator[Source]:
    """Open a checkpoint for the body, in any of its forms; see `Source`."""
    source = Source(path, kind, in_memory=in_memory, checks=checks)
    try:
        yield source
    finally:
        source.close()
