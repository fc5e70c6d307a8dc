"""The names of a checkpoint's files, and the index that tells which of them holds which tensor.

Names are those that Hugging Face libraries write and look for.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import CheckpointAbsentError, CheckpointDamagedError
from booster_core.state import library_of, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from booster_checkpoint.files.tensor_file import TensorSpec
    from booster_checkpoint.storage import Location

SAFETENSORS, TORCH = ".safetensors", ".bin"
MODEL, TORCH_MODEL, OPTIMIZER, EMA = "model", "pytorch_model", "optimizer", "ema"
DIFFUSERS = "diffusion_pytorch_model"
INTERRUPTED = ".interrupted"
"""Suffix of the file that says that a save is replacing a checkpoint's files; after a kill, it stays."""
_OF_A_RANK = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
_LONGEST_NAME = 255
"""What file systems take; a longer name would be an error of the operating system."""


@dataclass(frozen=True, kw_only=True)
class FileNames:
    """The names of one checkpoint's files.

    Args:
        base: ``"model"``, ``"pytorch_model"``, ``"diffusion_pytorch_model"`` or ``"optimizer"``.
        suffix: ``".safetensors"`` or ``".bin"``.
        prefix: Put between base and suffix, as Hugging Face does with a ``variant``: ``model.ema.safetensors``.
    """

    base: str
    suffix: str = SAFETENSORS
    prefix: str | None = None

    @property
    def stem(self) -> str:
        """The name of the single file without its suffix."""
        return self.base if not self.prefix else f"{self.base}.{self.prefix}"

    @property
    def single(self) -> str:
        """The name of the one file of an undivided checkpoint."""
        return f"{self.stem}{self.suffix}"

    @property
    def index(self) -> str:
        """The name of the index of a divided checkpoint."""
        middle = "" if not self.prefix else f".{self.prefix}"
        if self.base == DIFFUSERS:
            return f"{self.base}{self.suffix}{middle}.index.json"
        return f"{self.base}{self.suffix}.index{middle}.json"

    @property
    def mark(self) -> str:
        """The name of the file that is there while the files of a divided checkpoint are replaced."""
        return mark_of(self.index)

    @property
    def other_forms(self) -> tuple[FileNames, ...]:
        """The other forms of the same checkpoint, one of which a reader might take in place of this one."""
        if self.base == DIFFUSERS:
            other = TORCH if self.suffix == SAFETENSORS else SAFETENSORS
            return (FileNames(base=DIFFUSERS, suffix=other, prefix=self.prefix),)
        if self.base == TORCH_MODEL:
            return (FileNames(base=MODEL, prefix=self.prefix),)
        return (FileNames(base=TORCH_MODEL, suffix=TORCH, prefix=self.prefix),) if self.base == MODEL else ()

    @property
    def groups(self) -> str:
        """The name of the file with an optimizer's parameter groups."""
        return "param_groups.json" if not self.prefix else f"param_groups.{self.prefix}.json"

    def part(self, number: int, total: int) -> str:
        """Return the name of one file of a divided checkpoint; ``number`` counts from 1."""
        return f"{self.stem}-{number:05d}-of-{total:05d}{self.suffix}"

    def is_part(self, name: str) -> bool:
        """Whether a name is that of a file of a divided checkpoint of this stem."""
        return re.fullmatch(rf"{re.escape(self.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(self.suffix)}", name) is not None

    def includes(self, name: str) -> bool:
        """Whether a name is that of any file of a checkpoint of this stem, the parameter groups left out."""
        return name in (self.single, self.index) or self.is_part(name)


def file_names(model: nn.Module | None, prefix: str | None = None, *, use_safetensors: bool = True) -> FileNames:
    """Return how the files of a model are called, by the library that reads it.

    Args:
        model: The user's own model.
        prefix: As for `FileNames`.
        use_safetensors: Whether they are safetensors.
    """
    suffix = SAFETENSORS if use_safetensors else TORCH
    of_others = MODEL if use_safetensors else TORCH_MODEL
    return FileNames(base=DIFFUSERS if library_of(model) == "diffusers" else of_others, suffix=suffix, prefix=prefix)


def mark_of(index: str) -> str:
    """Return the name of the file that is there while the files of an index are replaced."""
    return f".{index}{INTERRUPTED}"


def index_text(files: Mapping[str, str], specs: Iterable[TensorSpec]) -> str:
    """Return the content of an index as Hugging Face libraries write it: which file holds which tensor."""
    total_bytes = sum(spec.nbytes for spec in specs)
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}, indent=2) + "\n"


def read_index(path: Location) -> dict[str, str]:
    """Return tensor name to file name.

    Raises:
        CheckpointAbsentError: If there is no such file.
        CheckpointDamagedError: If the file is not an index, or leads out of its folder.
    """
    written = path.read_bytes()
    if written is None:
        msg = f"There is no index '{path}'."
        raise CheckpointAbsentError(msg)
    content = parse_json(written, str(path))
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        msg = f"'{path}' is not a checkpoint index: it has no `weight_map` from tensor names to file names."
        raise CheckpointDamagedError(msg)
    for name in files.values():
        if not name or name in (".", "..") or "/" in name or "\\" in name or len(name) > _LONGEST_NAME:
            msg = (
                f"The index '{path}' names the file '{name[:_LONGEST_NAME]}', which is not in its folder. It is "
                "damaged or hostile."
            )
            raise CheckpointDamagedError(msg)
    return files


def rank_shards_among(names: Iterable[str]) -> list[str]:
    """Return the names of files that ranks wrote for themselves; see `booster_checkpoint.files.rank_shards`."""
    return [name for name in names if _OF_A_RANK.fullmatch(name)]
