"""The names of a checkpoint's files, as Hugging Face libraries write and look for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

SAFETENSORS, TORCH = ".safetensors", ".bin"
MODEL, TORCH_MODEL, OPTIMIZER, EMA = "model", "pytorch_model", "optimizer", "ema"
INTERRUPTED = ".interrupted"
"""Suffix of the file that says that a save is replacing a checkpoint's files; after a kill, it stays."""


@dataclass(frozen=True, kw_only=True)
class FileNames:
    """The names of one checkpoint's files.

    Args:
        base: ``"model"``, ``"pytorch_model"`` or ``"optimizer"``.
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
        return f"{self.base}{self.suffix}.index{middle}.json"

    @property
    def mark(self) -> str:
        """The name of the file that is there while the files of a divided checkpoint are replaced."""
        return mark_of(self.index)

    @property
    def read_first(self) -> tuple[FileNames, ...]:
        """The other forms of the same checkpoint that readers prefer to this one, where both are there."""
        return (FileNames(base=MODEL, prefix=self.prefix),) if self.base == TORCH_MODEL else ()

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


def mark_of(index: str) -> str:
    """Return the name of the file that is there while the files of an index are replaced."""
    return f".{index}{INTERRUPTED}"
