"""The bytes of a file, local or at a URL, and how boxes of its tensors get into memory.

A range of a box that is one range of the file, too, is read straight into its place. Rows with gaps between them, such
as columns of a matrix, are read in windows, gaps included, and copied out of these.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from booster_checkpoint.files.checksums import Kept
from booster_checkpoint.files.read_ahead import GAP_BYTES, pieces_of
from booster_checkpoint.storage import LocalFile, RemotePath
from booster_checkpoint.storage.remote_path import REQUEST_BYTES
from booster_core.state import as_bytes, box_shape, is_contiguous, runs_of, slices_of, span_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.storage import RemoteFile
    from booster_core.state import Box

_LOCAL_WINDOW_BYTES = 1 << 20
"""How much of a local file is read at a time to copy rows out of it: it stays in a processor's cache."""
_LOCAL_GAP_BYTES = 1 << 15
"""Bytes of a local file that are read and thrown away rather than left out by one call more."""


class ByteFile:
    """The bytes of a file, read in ranges by any thread.

    Args:
        path: The file.
        checks: Verifies what is read.
        in_memory: Read all of it at once when the first box is asked for, and take boxes from there.

    Attributes:
        size: Its size in bytes.
        is_in_memory: Whether boxes come from memory.
        remote: The open file, if it is at a URL.

    Raises:
        CheckpointError: If it cannot be opened; see `LocalFile` for the kinds of failure.
    """

    def __init__(self, path: Path, checks: CheckedReads | None = None, *, in_memory: bool = False) -> None:
        self.path = path
        self.remote: RemoteFile | None = path.open_ranges() if isinstance(path, RemotePath) else None
        self._file = self.remote or LocalFile(path)
        self.size: int = self._file.size
        self.is_in_memory = in_memory
        self._checks = checks
        self._content: memoryview | None = None
        self._lock = threading.Lock()

    def extent(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range that is read where a range is asked for: up to the end of the block it ends in."""
        return (start, stop) if self._checks is None else (start, self._checks.end_of_block(stop))

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory from a byte offset.

        Raises:
            CheckpointError: If the file ends before that, cannot be read, or the bytes are not what was saved.
        """
        self._read(target, offset)

    def read_box(self, offset: int, shape: tuple[int, ...], itemsize: int, box: Box, out: torch.Tensor) -> None:
        """Read a box of a row-major tensor.

        Args:
            offset: Where the tensor's values begin, in bytes.
            shape: Shape of the whole tensor.
            itemsize: Bytes per element.
            box: The part to read; not empty.
            out: Contiguous CPU tensor of ``box_numel(box)`` elements.

        Raises:
            CheckpointError: As `read_into` does.
        """
        target = as_array(as_bytes(out), 0, box_shape(box), itemsize)
        if self.is_in_memory:
            np.copyto(target, as_array(self._whole(), offset, shape, itemsize)[slices_of(box)])
            return
        has_large_gaps = self.remote is None and _gap_of(shape, box) * itemsize > _LOCAL_GAP_BYTES
        if has_large_gaps or is_contiguous(shape, box):
            starts, length = runs_of(shape, box)
            memory, run_bytes = as_bytes(out), length * itemsize
            for number, start in enumerate(starts):
                self._read(memory[number * run_bytes : (number + 1) * run_bytes], offset + start * itemsize)
            return
        strides = tuple(math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape)))
        window = memoryview(b"")
        for piece in self._pieces_of(shape, box, itemsize):
            first, last = (edge * itemsize for edge in span_of(shape, piece))
            part = target[slices_of(piece, box)]
            if is_contiguous(shape, piece):
                self._read(part.reshape(-1).view(np.uint8).data, offset + first)
                continue
            if len(window) < last - first:
                window = np.empty(last - first, dtype=np.uint8).data
            self._read(window[: last - first], offset + first, Kept(offset, shape, itemsize, box))
            np.copyto(part, np.ndarray(part.shape, dtype=part.dtype, buffer=window, strides=strides))

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
        self._content = None

    def _pieces_of(self, shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[Box]:
        if self.remote is not None:
            return pieces_of(shape, box, itemsize, REQUEST_BYTES, GAP_BYTES)
        return pieces_of(shape, box, itemsize, _LOCAL_WINDOW_BYTES, _LOCAL_GAP_BYTES)

    def _read(self, target: memoryview, offset: int, kept: Kept | None = None) -> None:
        if self._checks is None:
            self._file.read_into(target, offset)
        else:
            self._checks.read(self._file.read_into, target, offset, kept)

    def _whole(self) -> memoryview:
        with self._lock:
            if self._content is None:
                content = np.empty(self.size, dtype=np.uint8).data
                self._read(content, 0)
                self._content = content
            return self._content


def _gap_of(shape: tuple[int, ...], box: Box) -> int:
    """Return how many elements are at least between two runs of a box in the row-major flattened tensor."""
    for dim in reversed(range(len(shape))):
        length = box[dim][1] - box[dim][0]
        if length < shape[dim]:
            return (shape[dim] - length) * math.prod(shape[dim + 1 :])
    return 0


def as_array(memory: memoryview, offset: int, shape: tuple[int, ...], itemsize: int) -> np.ndarray[Any, Any]:
    """Return memory as an array of opaque elements; unaligned memory is fine."""
    return np.ndarray(shape, dtype=f"V{itemsize}", buffer=memory, offset=offset)
