"""Writes a checkpoint again in another form: safetensors, ``torch.save`` files, or a DCP folder. Streamed, never whole.

The result is made under a temporary name in the same folder and renamed when it is complete.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from booster_checkpoint.files.dcp import METADATA, kinds_in, left_out_of, read_table
from booster_checkpoint.files.names import MODEL, OPTIMIZER, SAFETENSORS, TORCH, TORCH_MODEL, FileNames
from booster_checkpoint.files.quantized import without_quantization
from booster_checkpoint.load.source import Source, is_dcp_folder
from booster_checkpoint.run.manifest import MANIFEST
from booster_checkpoint.save.dcp import clear_temporaries, save_dcp
from booster_checkpoint.save.parts import ModelPart, OptimizerPart, Part
from booster_checkpoint.save.save import BUCKET_BYTES, Saver
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.session import Session
from booster_checkpoint.storage import LocalLocation
from booster_checkpoint.storage.location import sync_folders, temporary_name
from booster_checkpoint.tools.source_adapter import SourceAdapter
from booster_core.errors import CheckpointError, ConfigError, shorten
from booster_core.log import log
from booster_core.ranks import DistCoordinator
from booster_core.state import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from booster_checkpoint.storage import Location

DCP = "dcp"
FORMS = {"safetensors": SAFETENSORS, "bin": TORCH, DCP: DCP}


def kinds_at(path: Location) -> list[str]:
    """Return what is at a path: ``"model"``, ``"optimizer"``, or both of them.

    Raises:
        CheckpointError: If it is neither, or damaged.
    """
    if (path / MANIFEST).size() is not None:
        msg = f"'{path}' holds a whole training state. Pass '{path / MODEL}' or '{path / OPTIMIZER}'."
        raise CheckpointError(msg)
    if is_dcp_folder(path):
        return kinds_in(read_table(path))
    names = [name for name, size in path.children().items() if size is not None]
    if not names:
        source = Source(path, OPTIMIZER if path.name.startswith(OPTIMIZER) else MODEL)
        try:
            return [OPTIMIZER if "optimizer" in source.values or path.name.startswith(OPTIMIZER) else MODEL]
        finally:
            source.close()
    has_optimizer = any(name.startswith((f"{OPTIMIZER}.", f"{OPTIMIZER}-")) for name in names)
    has_model = any(name.endswith((SAFETENSORS, TORCH)) and not name.startswith(OPTIMIZER) for name in names)
    return [MODEL] * (has_model or not has_optimizer) + [OPTIMIZER] * has_optimizer


def convert(
    source: Location, target: Location, form: str, *, size_per_shard: int = 1024, dtype: torch.dtype | None = None
) -> dict[str, int]:
    """Write a checkpoint again in another form.

    Args:
        source: A model's or an optimizer's file, index, or folder; of any form, at any place.
        target: A file where the name ends like one (``.safetensors``, ``.bin``), else a folder; must not exist. Other
            files of a source folder, such as ``config.json``, are copied to a target folder.
        form: ``"safetensors"``, ``"bin"`` or ``"dcp"``.
        size_per_shard: Largest size of a file in a folder, in MiB.
        dtype: Convert a model's floating tensors to this dtype, weights in block FP8 and MXFP4 included. An
            optimizer's stay as they are.

    Returns:
        The sizes of the files that were written, by name.

    Raises:
        ConfigError: If form and target do not fit, or there is no model for ``dtype``.
        CheckpointError: If the source is damaged, or the target cannot be written.

    Memory: 64 MiB; a ``torch.save`` file at a URL, or of a torch before version 1.6, is read as a whole.
    """
    suffix = FORMS[form]
    kinds = kinds_at(source)
    file_name = target.name if target.suffix in (SAFETENSORS, TORCH, ".pt", ".pth") else None
    _check(source, target, form, kinds, file_name, dtype)
    if target.size() is not None or target.is_folder():
        msg = f"'{target}' exists already. Remove it, or pass another path."
        raise CheckpointError(msg)
    if is_dcp_folder(source) and (left_out := left_out_of(read_table(source))):
        log.warning("'%s' also holds %s, which no other form has room for.", source, shorten(left_out))
    with _folder_of(target, file_name) as folder:
        _write_from(source, kinds, folder, suffix, file_name, size_per_shard, dtype)
        if file_name is None and form != DCP and source.is_folder():
            _copy_others(source, folder, dtype)
    written = {target.name: target.size()} if file_name is not None else target.children()
    return {name: size for name, size in written.items() if size is not None}


@contextmanager
def _folder_of(target: Location, file_name: str | None) -> Iterator[Location]:
    """Yield the folder to write to; on a disk, one of another name, which gets its own when all of it is there.

    Args:
        target: The folder; or the file, if it has a name.
        file_name: The file's name.
    """
    if not isinstance(target, LocalLocation):
        yield target if file_name is None else target.parent
        return
    path = target.path
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_temporaries(path)
    temporary = path.parent / temporary_name(path.name)
    try:
        yield LocalLocation(temporary)
        (temporary / file_name if file_name is not None else temporary).rename(path)
        sync_folders(path.parent)
    except OSError as error:
        msg = f"'{target}' cannot be written: {error.strerror or error}."
        raise CheckpointError(msg) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check(
    source: Location,
    target: Location,
    form: str,
    kinds: Sequence[str],
    file_name: str | None,
    dtype: torch.dtype | None,
) -> None:
    """Raise `ConfigError` where what is asked for contradicts itself, or what is there."""
    suffix = FORMS[form]
    if file_name is not None and (form == DCP or (target.suffix == SAFETENSORS) != (suffix == SAFETENSORS)):
        msg = f"'{target}' does not name what `--to {form}` writes. Pass a folder, or a name that ends accordingly."
        raise ConfigError(msg)
    if (file_name is not None or form == DCP) and len(kinds) > 1:
        remedy = (
            "Pass a folder and `--to safetensors`" if is_dcp_folder(source) else "Pass the path of one of their files"
        )
        msg = f"'{source}' holds a model and an optimizer, which need a folder as safetensors. {remedy}."
        raise ConfigError(msg)
    if OPTIMIZER in kinds and suffix == TORCH:
        msg = f"'{source}' holds an optimizer, which is written as safetensors or DCP. Use `--to safetensors`."
        raise ConfigError(msg)
    if dtype is not None and MODEL not in kinds:
        msg = f"'{source}' holds an optimizer, whose state keeps its dtypes. Leave out `--dtype`."
        raise ConfigError(msg)


def _write_from(
    source: Location,
    kinds: Sequence[str],
    folder: Location,
    suffix: str,
    file_name: str | None,
    size_per_shard: int,
    dtype: torch.dtype | None,
) -> None:
    with ExitStack() as stack:
        sources = {kind: Source(source, kind) for kind in kinds}
        for opened in sources.values():
            stack.callback(opened.close)
        if dtype is not None and MODEL in sources:
            sources[MODEL].dequantize()
        _write(sources, folder, suffix, file_name, size_per_shard, dtype)


def _write(
    sources: dict[str, Source],
    folder: Location,
    suffix: str,
    file_name: str | None,
    size_per_shard: int,
    dtype: torch.dtype | None,
) -> None:
    session = Session(DistCoordinator(), timeout_seconds=None)
    max_bytes = None if file_name is not None or suffix == DCP else size_per_shard << 20
    parts: list[Part] = []
    for kind, source in sources.items():
        adapter = SourceAdapter(source, is_optimizer=kind == OPTIMIZER)
        base = OPTIMIZER if kind == OPTIMIZER else TORCH_MODEL if suffix == TORCH else MODEL
        names = FileNames(base=base, suffix=SAFETENSORS if suffix == DCP else suffix)
        if kind == OPTIMIZER:
            parts.append(OptimizerPart(adapter, names, max_bytes=max_bytes, file_name=file_name))
        else:
            parts.append(ModelPart(adapter, names, max_bytes=max_bytes, file_name=file_name, dtype=dtype))
    if suffix == DCP:
        (part,) = parts
        save_dcp("convert", session, part, folder)
    else:
        Saver(session, BUCKET_BYTES).save(parts, target_at(folder), "convert")


def _copy_others(source: Location, folder: Location, dtype: torch.dtype | None) -> None:
    """Copy a folder's files that are neither tensors nor about tensors; ``config.json`` names the new dtype."""
    converted = {METADATA}
    if is_dcp_folder(source):
        converted |= {place.file for place in read_table(source).slices.values()}
    for name, size in source.children().items():
        is_tensors = name.endswith((SAFETENSORS, TORCH)) or ".index." in name or name in converted
        is_described = name.startswith(("param_groups", "."))
        if size is None or is_tensors or is_described:
            continue
        config = _with_dtype(source / name, dtype) if name == "config.json" and dtype is not None else None
        if config is not None:
            (folder / name).write_bytes(config)
        else:
            _copy(source / name, folder / name)


def _copy(place: Location, target: Location) -> None:
    """Copy a file of any size, which may be a data set or an optimizer's state of another library."""
    with closing(place.open()) as file:
        stream = target.open_write(file.size)
        try:
            for content in file.contents(0, file.size):
                stream.write(content)
            stream.close()
        finally:
            stream.discard()


def _with_dtype(place: Location, dtype: torch.dtype) -> bytes | None:
    """Return a model's configuration with another dtype, in which nothing is quantized; ``None`` if it is none."""
    config = without_quantization(parse_json(place.read_bytes() or b"", str(place)))
    if not isinstance(config, dict):
        return None
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    return (json.dumps({**config, name: str(dtype).removeprefix("torch.")}, indent=2) + "\n").encode()
