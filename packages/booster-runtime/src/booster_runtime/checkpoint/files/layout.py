"""Which tensor goes into which file: pure arithmetic on names and sizes that every rank repeats alike.

Tensors are put in the natural order of their names, so that files do not depend on the plugin, on the number of ranks
or on who owns what: the same state gives the same bytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One whole tensor as a file holds it.

    Args:
        key: Name in the file.
        shape: Shape of the whole tensor.
        dtype: Element type in the file.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor's values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def natural_order(name: str) -> tuple[tuple[tuple[int, int | str], ...], str]:
    """Return a sort key under which ``layers.2`` comes before ``layers.10``, and no two names are equal."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)), name


def split_into_files(specs: Iterable[TensorSpec], max_bytes: int | None) -> list[tuple[TensorSpec, ...]]:
    """Distribute tensors over files in natural order; one larger than the limit gets a file of its own.

    Args:
        specs: The tensors.
        max_bytes: Largest size of a file's values in bytes; one file for everything when ``None``.

    Returns:
        At least one file (which may be empty). Within a file tensors of wider elements come first, so that each
        tensor's values are aligned to its element size.
    """
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in sorted(specs, key=lambda spec: natural_order(spec.key)):
        if max_bytes is not None and files[-1] and size + spec.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.nbytes
    return [in_file_order(specs) for specs in files]


def in_file_order(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return tensors in the order of their values in a file: wider elements first, then by name."""
    return tuple(sorted(specs, key=lambda spec: (-spec.dtype.itemsize, natural_order(spec.key))))
