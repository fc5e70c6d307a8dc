"""What a path holds, from headers and small files alone, and whether it is whole: for ``booster inspect``."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.names import MODEL, OPTIMIZER, read_index
from booster_checkpoint.load.load import read_optimizer_info
from booster_checkpoint.load.source import Source
from booster_checkpoint.run.checkpoint_root import open_run
from booster_checkpoint.run.manifest import MANIFEST, Manifest
from booster_checkpoint.run.training_part import TENSORS, VALUES
from booster_checkpoint.tools.convert import kinds_at
from booster_core.checkpoint_io import LATEST, parse_step_name
from booster_core.errors import CheckpointAbsentError, CheckpointError
from booster_core.state import parse_json, tensor_references

if TYPE_CHECKING:
    from booster_checkpoint.storage import Location


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor of a checkpoint.

    Args:
        name: Its name.
        dtype: Its element type.
        shape: Its shape.
        nbytes: Size of its values.
        file: The file that holds it, below the path that was asked about.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a path holds.

    Args:
        kind: ``"root"``, ``"training state"``, ``"model"``, ``"optimizer"``, or ``"model and optimizer"``.
        facts: What is known of it, in the order in which it is shown.
        tensors: Its tensors.
    """

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: list[TensorRow] = field(default_factory=list)


def is_root(path: Location) -> bool:
    """Whether a folder holds steps of training states."""
    return open_run(path).exists()


def inspect(path: Location) -> Inspection:
    """Describe what is at a path. No tensor's values are read.

    Raises:
        CheckpointError: If it is no checkpoint, or its headers are damaged.
    """
    if is_root(path):
        return _inspect_root(path)
    if (path / MANIFEST).size() is not None:
        return _inspect_step(path)
    kinds = kinds_at(path)
    facts: dict[str, Any] = {}
    tensors: list[TensorRow] = []
    for kind in kinds:
        more, rows = _inspect_part(path, kind, path if path.is_folder() else path.parent)
        facts |= more
        tensors += rows
    return Inspection(kind=" and ".join(kinds), facts=facts, tensors=tensors)


def _inspect_root(path: Location) -> Inspection:
    run = open_run(path)
    facts: dict[str, Any] = {"latest": run.latest_name()}
    for name in run.steps():
        try:
            manifest = run.manifest(name)
        except CheckpointError as error:  # the others are shown all the same
            facts[name] = f"not whole: {error}"
            continue
        nbytes = sum(entry.nbytes for entry in manifest.files.values())
        facts[name] = f"{nbytes:,} bytes in {len(manifest.files)} files, saved {manifest.facts.get('saved_at')}"
    return Inspection(kind="root", facts=facts)


def _inspect_step(path: Location) -> Inspection:
    manifest = Manifest.read(path)
    facts: dict[str, Any] = {"step": manifest.step, **manifest.facts}
    tensors: list[TensorRow] = []
    for kind in (MODEL, OPTIMIZER):
        if (path / kind).is_folder():
            more, rows = _inspect_part(path / kind, kind, path)
            facts |= more
            tensors += rows
    saved = _read_json(path / VALUES)
    facts["lr_schedulers"] = [content["scheduler"] for content in saved["lr_schedulers"]]
    facts["loss_scale"] = saved["loss_scaler"] and saved["loss_scaler"]["scale"]
    facts["dataloader"] = saved["dataloader"]
    extra = saved["extra"]
    facts["extra"] = sorted(extra) if isinstance(extra, dict) else extra
    facts["random states"] = f"of {len(saved['random'])} rank(s)"
    return Inspection(kind="training state", facts=facts, tensors=tensors)


def _inspect_part(path: Location, kind: str, base: Location) -> tuple[dict[str, Any], list[TensorRow]]:
    source = Source(path, kind)
    try:
        rows = [
            TensorRow(
                name=name,
                dtype=str(meta.dtype).removeprefix("torch."),
                shape=meta.shape,
                nbytes=math.prod(meta.shape) * meta.dtype.itemsize,
                file=_relative(source.home_of(name), base),
            )
            for name, meta in source.tensors.items()
        ]
        facts: dict[str, Any] = {}
        if kind == OPTIMIZER:
            info = read_optimizer_info(source)
            facts["parameter groups"] = [
                f"{len(group.params)} parameters, " + ", ".join(f"{k}={v}" for k, v in group.options.items())
                for group in info.groups
            ]
        else:
            if source.values:
                facts["extra state"] = sorted(source.values)
            config = path / "config.json"
            if config.size() is not None:
                content = _read_json(config)
                known = ("architectures", "model_type", "dtype", "transformers_version")
                facts["config"] = {key: content[key] for key in known if key in content}
        return facts, rows
    finally:
        source.close()


def _relative(path: Location, base: Location) -> str:
    return str(path).removeprefix(str(base)).replace(os.sep, "/").removeprefix("/") or path.name


def _read_json(path: Location) -> Any:
    written = path.read_bytes()
    if written is None:
        msg = f"There is no '{path}'."
        raise CheckpointAbsentError(msg)
    return parse_json(written, str(path))


def check(path: Location) -> tuple[list[str], str]:
    """Check what is at a path as far as possible.

    Returns:
        What is wrong, in words; and what was checked.

    Collective: none; reads every byte where there are checksums, else headers.
    """
    try:
        if is_root(path):
            return _check_root(path)
        if (path / MANIFEST).size() is not None:
            return _check_step(path), "sizes and checksums of all files, headers, and indices"
        problems = [problem for kind in kinds_at(path) for problem in _part_problems(path, kind)]
        folder = path.parent
        if (folder / MANIFEST).size() is not None:
            manifest = Manifest.read(folder)
            names = manifest.below([path.name])
            problems += manifest.size_problems(folder, names) or manifest.content_problems(folder, names)
            return problems, "sizes and checksums of its files, headers, and indices"
    except CheckpointError as error:
        return [str(error)], ""
    return problems, "sizes, headers and indices; there is no manifest with checksums"


def _check_root(path: Location) -> tuple[list[str], str]:
    run, problems = open_run(path), list[str]()
    try:
        run.find(LATEST)
    except CheckpointError as error:
        problems.append(str(error))
    for name, size in path.children().items():
        if parse_step_name(name) and size is None:
            problems += [f"{name}: {problem}" for problem in check(path / name)[0]]
    return problems, f"sizes and checksums of all files of {len(run.steps())} steps, headers, and indices"


def _check_step(folder: Location) -> list[str]:
    manifest = Manifest.read(folder)
    problems = manifest.size_problems(folder, list(manifest.files))
    present = [name for name in manifest.files if (folder / name).size() is not None]
    problems += [
        problem
        for problem in manifest.content_problems(folder, present)
        if not any(problem.partition(" has ")[0] == other.partition(" has ")[0] for other in problems)
    ]
    for kind in (MODEL, OPTIMIZER):
        if any(name.startswith(f"{kind}/") for name in manifest.files):
            problems += _part_problems(folder / kind, kind)
    if None in folder.sizes([VALUES, TENSORS]):
        problems.append(f"'{VALUES}' or '{TENSORS}' is missing")
    return problems


def _part_problems(path: Location, kind: str) -> list[str]:
    """Return what is wrong with headers and index; opening the files checks each header against its file."""
    try:
        source = Source(path, kind)
    except CheckpointError as error:
        return [str(error)]
    try:
        if kind == OPTIMIZER:
            read_optimizer_info(source)
        problems = []
        if source.index is not None:
            listed = read_index(source.index)
            inside = {key for value in source.values.values() for key in tensor_references(value)}
            unlisted = [name for name in source.tensors if name not in listed and name not in inside]
            problems += [f"'{name}' is in a file, but not in the index '{source.index}'" for name in unlisted[:10]]
    except CheckpointError as error:
        return [str(error)]
    else:
        return problems
    finally:
        source.close()
