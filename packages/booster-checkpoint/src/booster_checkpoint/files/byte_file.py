"""The bytes of a file, local or at a URL, and how boxes of its tensors get into memory.

A range of a box that is one range of the file, too, is read straight into its place. Rows with gaps between them, such
as columns of a matrix, are read in windows, gaps included, and copied out of these.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from booster_checkpoint.files.checksums import Kept
from booster_core.state import as_bytes, box_shape, is_contiguous, runs_of, slices_of, span_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from booster_checkpoint.files.checksums import CheckedReads
    from booster_checkpoint.storage import OpenFile
    from booster_core.state import Box


class ByteFile:
    """The bytes of a file, read in ranges by any thread.

    Args:
        file: The open file, which `close` closes.
        checks: Verifies what is read.

    Attributes:
        size: Its size in bytes.
    """

    def __init__(self, file: OpenFile, checks: CheckedReads | None = None) -> None:
        self.file = file
        self.size = file.size
        self._checks = checks

    def ranges_of(self, offset: int, shape: tuple[int, ...], itemsize: int, box: Box) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the file that `read_box` reads, checks included."""
        for piece in pieces_of(shape, box, itemsize, self.file.window_bytes, self.file.gap_bytes):
            start, stop = (offset + edge * itemsize for edge in span_of(shape, piece))
            yield start, stop if self._checks is None else self._checks.end_of_block(stop)

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
        if _gap_of(shape, box) * itemsize > self.file.gap_bytes or is_contiguous(shape, box):
            starts, length = runs_of(shape, box)
            memory, run_bytes = as_bytes(out), length * itemsize
            for number, start in enumerate(starts):
                self._read(memory[number * run_bytes : (number + 1) * run_bytes], offset + start * itemsize)
            return
        strides = tuple(math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape)))
        window = memoryview(b"")
        for piece in pieces_of(shape, box, itemsize, self.file.window_bytes, self.file.gap_bytes):
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
        self.file.close()

    def _read(self, target: memoryview, offset: int, kept: Kept | None = None) -> None:
        if self._checks is None:
            self.file.read_into(target, offset)
        else:
            self._checks.read(self.file.read_into, target, offset, kept)


def pieces_of(shape: tuple[int, ...], box: Box, itemsize: int, window_bytes: int, gap_bytes: int) -> Iterator[Box]:
    """Cut a box of a row-major tensor in a file into boxes, the span of each of which is worth reading whole.

    They follow each other in the box' own row-major order. Each is either one range of the file, or has rows with small
    gaps between them and a span of at most a window, or of one row.

    Args:
        shape: Shape of the whole tensor.
        box: The part to read; not empty.
        itemsize: Bytes per element.
        window_bytes: Most bytes to read at a time, where there are gaps in between.
        gap_bytes: The largest gap that is read, too.
    """
    if is_contiguous(shape, box):
        yield box
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    first, last = span_of(shape[1:], box[1:])
    start, stop = box[0]
    is_row_solid = is_contiguous(shape[1:], box[1:]) or row_bytes <= window_bytes
    if is_row_solid and row_bytes - (last - first) * itemsize <= gap_bytes:
        step = max(window_bytes // row_bytes, 1)
        for begin in range(start, stop, step):
            yield ((begin, min(begin + step, stop)), *box[1:])
        return
    for index in range(start, stop):
        for inner in pieces_of(shape[1:], box[1:], itemsize, window_bytes, gap_bytes):
            yield ((index, index + 1), *inner)


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
