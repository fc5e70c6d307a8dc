"""Writing a box whose rows are apart in the file, such as columns of a matrix, next to ranks that write the others.

Written run by run, columns of a few elements would take a system call each; through a shared mapping it is one strided
copy. A write through a mapping that finds the disk full ends the process, so the tensor's space is reserved first, and
where the file system cannot do that (NFS before 4.2, most of FUSE, ramfs), the runs are written one by one.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from booster_checkpoint.files.byte_file import as_array
from booster_checkpoint.save.in_place import write_at
from booster_core.state import box_shape, runs_of, slices_of

if TYPE_CHECKING:
    from pathlib import Path

    from booster_core.state import Box

_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EBADF)
"""What ``posix_fallocate`` says without support. EBADF comes from glibc's emulation, which wants to read as well."""
_WINDOW_BYTES = 4 << 20
"""How much of a file is mapped at a time, unless one row is larger."""


def write_strided(path: Path, offset: int, shape: tuple[int, ...], itemsize: int, box: Box, values: memoryview) -> None:
    """Write a box of a row-major tensor in a file.

    Args:
        path: The file.
        offset: Where the tensor's values begin, in bytes.
        shape: Shape of the whole tensor.
        itemsize: Bytes per element.
        box: The part to write; not empty.
        values: The values, row-major.

    Collective: none. Ranks of one host may write other boxes of the tensor at the same time.
    """
    if not _reserve(path, offset, math.prod(shape) * itemsize):
        descriptor = os.open(path, os.O_WRONLY)
        try:
            starts, length = runs_of(shape, box)
            for number, start in enumerate(starts):
                run = values[number * length * itemsize : (number + 1) * length * itemsize]
                write_at(descriptor, run, offset + start * itemsize)
        finally:
            os.close(descriptor)
        return
    source = as_array(values, 0, box_shape(box), itemsize)
    (first, last), row_bytes = box[0], itemsize * math.prod(shape[1:])
    step = max(_WINDOW_BYTES // row_bytes, 1)
    descriptor = os.open(path, os.O_RDWR)
    try:
        for start in range(first, last, step):
            stop = min(start + step, last)
            begin, end = offset + start * row_bytes, offset + stop * row_bytes
            base = begin - begin % mmap.ALLOCATIONGRANULARITY
            with mmap.mmap(descriptor, end - base, mmap.MAP_SHARED, offset=base) as mapping:
                # Not in a variable: a mapping with views cannot be closed.
                np.copyto(
                    as_array(memoryview(mapping), begin - base, (stop - start, *shape[1:]), itemsize)[
                        (slice(None), *slices_of(box[1:]))
                    ],
                    source[start - first : stop - first],
                )
    finally:
        os.close(descriptor)


def _reserve(path: Path, offset: int, nbytes: int) -> bool:
    """Set space aside in a sparse file; return whether the file system can.

    Raises:
        OSError: If there is no space.
    """
    # Write-only, because glibc would otherwise emulate the call, with a read and a write for each block.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        return False
    finally:
        os.close(descriptor)
    return True
