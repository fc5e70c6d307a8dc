"""Reading files of tensors in parts: the interface of a file, and how ranges of it get into a tensor's memory.

A box that is contiguous in the file takes one ``pread`` straight into the tensor's memory. Any other box (columns of a
matrix) is one strided copy from a shared mapping, which costs page-cache memory but none of the process' own. A file at
a URL is read by ranges (`booster_runtime.checkpoint.files.ranges`).
"""

from __future__ import annotations

import math
import mmap
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from booster_core.errors import CheckpointError
from booster_core.state import box_shape
from booster_runtime.checkpoint.files.ranges import read_box
from booster_runtime.state.regions import as_bytes, slices_of
from booster_runtime.storage import RemoteFile, RemotePath

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from booster_core.state import Box, TensorMeta

_MAX_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB - 4 KiB per call."""
_WINDOW_BYTES = 4 << 20
"""How much of a file is mapped at a time, unless one row is larger."""


class TensorFile(ABC):
    """An open file of tensors. Its directory has been read and checked; no values have."""

    path: Path
    tensors: Mapping[str, TensorMeta]
    """What the file says of its tensors."""
    values: Mapping[str, Any]
    """What else it holds: encoded JSON by name."""

    @abstractmethod
    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor.

        Safe to call from several threads.

        Args:
            key: The tensor.
            box: Index range of the whole tensor; not empty.
            out: Where to put it, row-major: contiguous on the CPU, 1-D, with the file's dtype.
        """

    def place_of(self, key: str) -> tuple[RemoteFile, int] | None:
        """Return the file at a URL, and where in it a tensor's values begin, where they are read from there."""
        del key
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""


def open_file(path: Path) -> int | RemoteFile:
    """Open a file for the functions below: a descriptor, or a file at a URL.

    Raises:
        OSError: If it cannot be opened.
    """
    return path.open_ranges() if isinstance(path, RemotePath) else os.open(path, os.O_RDONLY)


def close_file(file: int | RemoteFile) -> None:
    """Close what `open_file` opened."""
    os.close(file) if isinstance(file, int) else file.close()


def size_of(file: int | RemoteFile) -> int:
    """Return the size of a file in bytes."""
    return os.fstat(file).st_size if isinstance(file, int) else file.size


def read_some(file: int | RemoteFile, nbytes: int, offset: int) -> bytes:
    """Return bytes from an offset on: fewer where the file ends before."""
    if isinstance(file, int):
        return os.pread(file, nbytes, offset)
    content = bytearray(max(min(nbytes, file.size - offset), 0))
    file.read_into(memoryview(content), offset)
    return bytes(content)


def pread_into(descriptor: int | RemoteFile, target: memoryview, offset: int, path: Path) -> None:
    """Fill ``target`` from a byte offset of a file.

    Raises:
        CheckpointError: If the file ends before that.
    """
    if not isinstance(descriptor, int):
        descriptor.read_into(target, offset)
        return
    while target:
        count = os.preadv(descriptor, [target[:_MAX_CALL_BYTES]], offset)
        if count == 0:
            msg = f"'{path}' ended at byte {offset} while it was being read. Did something truncate it?"
            raise CheckpointError(msg)
        target = target[count:]
        offset += count


def read_strided(
    source: int | memoryview | RemoteFile,
    offset: int,
    shape: tuple[int, ...],
    itemsize: int,
    box: Box,
    out: torch.Tensor,
) -> None:
    """Copy a box of a row-major tensor in a file, or in memory, to ``out``.

    Args:
        source: What `open_file` returned, or the bytes themselves.
        offset: Where the tensor's values begin, in bytes.
        shape: Shape of the whole tensor.
        itemsize: Bytes per element.
        box: The part to copy; not empty.
        out: Contiguous CPU tensor of ``box_numel(box)`` elements.
    """
    target = as_array(as_bytes(out), 0, box_shape(box), itemsize)
    if isinstance(source, memoryview):
        np.copyto(target, as_array(source, offset, shape, itemsize)[slices_of(box)])
        return
    if not isinstance(source, int):
        read_box(source, offset, shape, itemsize, box, target)
        return
    (first, last), row_bytes = box[0], itemsize * math.prod(shape[1:])
    step = max(_WINDOW_BYTES // row_bytes, 1)
    for start in range(first, last, step):
        stop = min(start + step, last)
        begin, end = offset + start * row_bytes, offset + stop * row_bytes
        base = begin - begin % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(source, end - base, mmap.MAP_SHARED, mmap.PROT_READ, offset=base)
        try:
            # Not in a variable: a mapping with views cannot be closed.
            np.copyto(
                target[start - first : stop - first],
                as_array(memoryview(mapping), begin - base, (stop - start, *shape[1:]), itemsize)[
                    (slice(None), *slices_of(box[1:]))
                ],
            )
        finally:
            mapping.close()


def as_array(memory: memoryview, offset: int, shape: tuple[int, ...], itemsize: int) -> np.ndarray[Any, Any]:
    """Return memory as an array of opaque elements; unaligned memory is fine."""
    kind = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(itemsize, f"V{itemsize}")
    return np.ndarray(shape, dtype=kind, buffer=memory, offset=offset)
