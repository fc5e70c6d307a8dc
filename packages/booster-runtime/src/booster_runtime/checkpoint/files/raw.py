"""Bytes between tensors in memory and ranges of a file: plain reads and writes, and mappings for strided parts.

A box that is contiguous in the file takes one ``pread`` or ``pwrite`` straight from or into the tensor's memory. Any
other box (columns of a matrix) is one strided copy through a shared mapping, which costs page-cache memory but none of
the process' own. Two kinds of files are written by plain writes of runs instead: files that several hosts write to,
because a mapping sends whole pages, and files without reserved space, because a mapping cannot report a full disk.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from booster_core.errors import CheckpointError
from booster_core.state import box_numel, box_shape
from booster_runtime.state.regions import runs_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from booster_core.state import Box

_MAX_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB - 4 KiB per call."""
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EBADF)
"""What ``posix_fallocate`` says without support. EBADF comes from glibc's emulation, which wants to read as well."""
_WINDOW_BYTES = 4 << 20
"""How much of a file is mapped at a time, unless one row is larger."""


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def pwrite_from(descriptor: int, source: memoryview, offset: int) -> None:
    """Write all of ``source`` at a byte offset of a file."""
    while source:
        written = os.pwrite(descriptor, source[:_MAX_CALL_BYTES], offset)
        source = source[written:]
        offset += written


def pread_into(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    """Fill ``target`` from a byte offset of a file.

    Raises:
        CheckpointError: If the file ends before that.
    """
    while target:
        count = os.preadv(descriptor, [target[:_MAX_CALL_BYTES]], offset)
        if count == 0:
            msg = f"'{path}' ended at byte {offset} while it was being read. Did something truncate it?"
            raise CheckpointError(msg)
        target = target[count:]
        offset += count


def reserve(path: Path, nbytes: int | None = None) -> bool:
    """Make the file system set space aside for a sparse file, if it can.

    A full disk is found now, as an error. Found later, by a write through a mapping, it would end the process.

    Args:
        path: The file.
        nbytes: How much from its start on; all of it when ``None``. A single byte tells whether the rest is reserved
            in a file that was created by a call for all of it.

    Returns:
        Whether the file system reserves space. Some cannot: NFS before 4.2, most of FUSE, ramfs.

    Raises:
        OSError: If there is no space.
    """
    nbytes = path.stat().st_size if nbytes is None else nbytes
    if nbytes == 0:
        return False
    # Write-only, because glibc would otherwise emulate the call, with a read and a write for each block.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def drop_pages(path: Path) -> None:
    """Write a file's pages out and drop them from this host's page cache, so that other hosts may write to them."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_strided(
    source: int | memoryview, offset: int, shape: tuple[int, ...], itemsize: int, box: Box, out: torch.Tensor
) -> None:
    """Copy a box of a row-major tensor in a file, or in memory, to ``out``.

    Args:
        source: File descriptor, or the bytes themselves.
        offset: Where the tensor's values begin, in bytes.
        shape: Shape of the whole tensor.
        itemsize: Bytes per element.
        box: The part to copy; not empty.
        out: Contiguous CPU tensor of ``box_numel(box)`` elements.
    """
    target = _array(as_bytes(out), 0, box_shape(box), itemsize)
    if isinstance(source, memoryview):
        np.copyto(target, _array(source, offset, shape, itemsize)[slices_of(box)])
        return
    for rows, part in _windows(shape, itemsize, box, target):
        mapping, start, mapped_shape = _map_rows(source, offset, shape, itemsize, rows, mmap.PROT_READ)
        try:
            np.copyto(part, _array(memoryview(mapping), start, mapped_shape, itemsize)[_within(box)])
        finally:
            mapping.close()


def write_strided(
    descriptor: int, offset: int, shape: tuple[int, ...], itemsize: int, box: Box, source: torch.Tensor
) -> None:
    """Copy ``source`` to a box of a row-major tensor in a file, through a mapping. The file's space is reserved.

    Args:
        descriptor: File opened for reading and writing.
        offset: Where the tensor's values begin, in bytes.
        shape: Shape of the whole tensor.
        itemsize: Bytes per element.
        box: The part to write; not empty.
        source: Contiguous CPU tensor of ``box_numel(box)`` elements.
    """
    values = _array(as_bytes(source), 0, box_shape(box), itemsize)
    for rows, part in _windows(shape, itemsize, box, values):
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapping, start, mapped_shape = _map_rows(descriptor, offset, shape, itemsize, rows, protection)
        try:
            np.copyto(_array(memoryview(mapping), start, mapped_shape, itemsize)[_within(box)], part)
        finally:
            mapping.close()


def write_runs(
    descriptor: int, offset: int, shape: tuple[int, ...], itemsize: int, box: Box, source: torch.Tensor
) -> None:
    """Do what `write_strided` does by one plain write for each contiguous run."""
    values = as_bytes(source)
    starts, length = runs_of(shape, box)
    nbytes = length * itemsize
    for index, start in enumerate(starts):
        pwrite_from(descriptor, values[index * nbytes : (index + 1) * nbytes], offset + start * itemsize)
    assert len(values) == box_numel(box) * itemsize, "the source has the box' size"


def _windows(
    shape: tuple[int, ...], itemsize: int, box: Box, values: np.ndarray[Any, Any]
) -> Iterator[tuple[tuple[int, int], np.ndarray[Any, Any]]]:
    """Cut a box along its first dimension, so that little is mapped at a time; yield rows and their values."""
    (first, last), row_bytes = box[0], itemsize * math.prod(shape[1:])
    step = max(_WINDOW_BYTES // row_bytes, 1)
    for start in range(first, last, step):
        stop = min(start + step, last)
        yield (start, stop), values[start - first : stop - first]


def _within(box: Box) -> tuple[slice, ...]:
    """Return the slices of a box in an array that has just the box' rows."""
    return (slice(None), *slices_of(box[1:]))


def _map_rows(
    descriptor: int, offset: int, shape: tuple[int, ...], itemsize: int, rows: tuple[int, int], protection: int
) -> tuple[mmap.mmap, int, tuple[int, ...]]:
    """Map some rows of a tensor; return the mapping, where the rows begin in it, and their shape."""
    row_bytes = itemsize * math.prod(shape[1:])
    first, last = offset + rows[0] * row_bytes, offset + rows[1] * row_bytes
    base = first - first % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(descriptor, last - base, mmap.MAP_SHARED, protection, offset=base)
    return mapping, first - base, (rows[1] - rows[0], *shape[1:])


def _array(memory: memoryview, offset: int, shape: tuple[int, ...], itemsize: int) -> np.ndarray[Any, Any]:
    """Return memory as an array of opaque elements; unaligned memory is fine."""
    kind = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(itemsize, f"V{itemsize}")
    return np.ndarray(shape, dtype=kind, buffer=memory, offset=offset)
