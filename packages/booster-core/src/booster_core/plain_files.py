"""Files of tensors and JSON, as `PlainCheckpointIO` writes and reads them, by the safetensors library, atomically."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from booster_core.errors import CheckpointError, needs_checkpoint, shorten
from booster_core.state import TensorMeta, decode_json, read_json, tensor_references

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

SUFFIX = ".safetensors"
TOKEN = "[0-9a-f]" * 16
"""A pattern for the random part of temporary names."""
_VALUES = "booster."
"""Begins the entries of a file's metadata that hold values of ours."""


class TensorFiles(NamedTuple):
    """What the files of a checkpoint hold.

    Args:
        path: The file, or their folder.
        tensors: By name; memory is taken as values are used.
        values: What is no tensor, as encoded JSON.
    """

    path: Path
    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @classmethod
    def at(cls, path: Path, stem: str) -> TensorFiles:
        """Open a file, or the files of a folder that this engine or booster-checkpoint wrote.

        Raises:
            CheckpointError: If there is no such checkpoint, or it is damaged.
        """
        base, _, prefix = stem.partition(".")
        single, index = f"{stem}{SUFFIX}", ".".join(filter(None, (f"{base}{SUFFIX}.index", prefix, "json")))
        with file_errors(path, "read"):
            names = {entry.name for entry in path.iterdir()} if path.is_dir() else set[str]()
        if path.is_file():
            return cls(path, *read_tensors(path))
        if f".{index}.interrupted" in names:
            msg = (
                f"A save into '{path}' was interrupted while it replaced an older checkpoint, so its files may be of "
                "two different saves. Save again, or load another checkpoint."
            )
            raise CheckpointError(msg)
        if single in names:
            return cls(path, *read_tensors(path / single))
        if index not in names:
            found = f"there is {shorten(sorted(names))}" if names else "there is nothing"
            msg = f"'{path}' holds no '{single}' and no '{index}': {found}. {needs_checkpoint('Other forms are read')}"
            raise CheckpointError(msg)
        homes = _read_index(path / index)
        files = cls(path, {}, {})
        for name in sorted(set(homes.values())):
            tensors, values = read_tensors(path / name)
            files.tensors.update(tensors)
            files.values.update(values)
        absent = sorted(homes.keys() - files.tensors.keys())
        if absent:
            msg = f"The index '{path / index}' names {len(absent)} tensors that its files lack: {shorten(absent)}."
            raise CheckpointError(msg)
        return files

    def metas(self) -> dict[str, TensorMeta]:
        """Return shape and element type of each tensor."""
        return {key: TensorMeta(shape=tuple(values.shape), dtype=values.dtype) for key, values in self.tensors.items()}


def _read_index(path: Path) -> dict[str, str]:
    """Return in which file of its folder each tensor is."""
    content = read_json(path)
    homes = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(homes, dict) or not all(
        isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\"}.intersection(name)
        for name in homes.values()
    ):
        msg = (
            f"'{path}' is not a checkpoint index, or names files that are not in its folder. It is damaged or hostile."
        )
        raise CheckpointError(msg)
    return homes


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a file's tensors, and what else it holds."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
            metadata = file.metadata() or {}
        own = {key: json.loads(text) for key, text in metadata.items() if key.startswith(_VALUES)}
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        msg = f"'{path}' cannot be read as safetensors: {error}. {needs_checkpoint('Other forms are read')}"
        raise CheckpointError(msg) from error
    return tensors, {key.removeprefix(_VALUES): value for key, value in own.items()}


def host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of values on the host, whose memory is its own; in another element type, if one is given."""
    return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a value, with tensors of its own."""
    return decode_json(value, {key: tensors[key].clone() for key in tensor_references(value) if key in tensors})


@contextlib.contextmanager
def file_errors(path: Path, verb: str) -> Iterator[None]:
    """Raise what fails in the body as a `CheckpointError` that names a path, and says that it can't be ``verb``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        msg = f"'{path}' cannot be {verb}: {reason}."
        raise CheckpointError(msg) from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give the name of a temporary file, which takes the place of ``path``, durably, if the body succeeds."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    made = [folder for folder in path.parents if not folder.exists()]
    is_done = False
    try:
        with file_errors(path, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f".{glob.escape(path.name)}.{TOKEN}.tmp"):  # of a save that was killed
                left.unlink(missing_ok=True)
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
            is_done = True
    finally:
        temporary.unlink(missing_ok=True)
        for folder in () if is_done else made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def write_tensors(path: Path, tensors: dict[str, Tensor], values: Mapping[str, Any] | None = None) -> None:
    """Replace a safetensors file.

    Args:
        path: The file; its folder is made as needed.
        tensors: On the host, without memory in common.
        values: What else it holds, as encoded JSON.

    Raises:
        CheckpointError: If it can't be written; an older file is then as it was.
    """
    metadata = {"format": "pt", **{_VALUES + name: json.dumps(value) for name, value in (values or {}).items()}}
    with _replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file; see `write_tensors`."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file of text; see `write_tensors`."""
    with _replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, last through a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
