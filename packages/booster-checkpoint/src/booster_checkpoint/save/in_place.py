"""Saves of ranks on one host: each writes its ranges into files that rank 0 has created.

Ranks of one host may write to the same files side by side, because they share a page cache. What is in other memory or
of another dtype passes through a bucket, of which one half is written while the other is filled. The disk begins with
what was written while more is written (`write_at`), and checksums are read back from the page cache while it ends.

Writes to one file wait for each other. Columns of a matrix, which are thousands of short runs, go through a mapping
instead, where ranks do not. A write through a mapping that finds the disk full would end the process, so the file's
space is reserved first; where the file system can't do that (NFS before 4.2, most of FUSE, ramfs), runs are written.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from booster_checkpoint.files.checksums import blocks_of_file
from booster_checkpoint.save.fragments import fill_buckets, host_buffer
from booster_checkpoint.storage import LocalLocation
from booster_core.state import as_bytes, box_shape, regions_of, runs_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import torch

    from booster_checkpoint.files.tensor_file import FileLayout
    from booster_checkpoint.save.fragments import DeviceCopies, Fragment
    from booster_checkpoint.save.plan import Sums, WriteJob
    from booster_checkpoint.save.targets import FolderTarget
    from booster_core.state import Box

_CALL_BYTES = 8 << 20
"""How much is written by one call, after which the disk is told to begin with it."""
_LEAST_BEGUN_BYTES = 1 << 20
"""Of less, the disk is told at the end: its pages may be shared with what is written next."""
_MOST_OPEN = 32
"""How many files are open at a time, however many a save writes."""
_MOST_SYNCED = 8
"""How many files are put on disk at once, which takes about as long as one of them."""
_LEAST_RUNS = 64
"""Fewer runs of a box are written one by one: a mapping costs about as much as twenty writes."""
_WINDOW_BYTES = 64 << 20
"""How much of a file is mapped at a time, unless one row is larger."""
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EBADF)
"""What ``posix_fallocate`` says without support. EBADF comes from glibc's emulation, which wants to read as well."""
_begin_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
if _begin_range is not None:
    _begin_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2


def write_in_place(job: WriteJob, target: FolderTarget) -> Sums:
    """Write all ranks' fragments into the files of a plan, which have been created, and wait until they are on disk.

    Args:
        job: What is written.
        target: Where the files are.

    Returns:
        The sizes of the files of tensors, and their blocks where checksums are asked for, on rank 0.

    Collective: every rank.
    """
    session, plan = job.session, job.plan

    def path_of(name: str) -> Path:
        return target.written(plan, name)

    sums: Sums = {}
    with closing(WrittenFiles()) as files:
        with session.together(f"{job.call} (write)", target.path, for_long=True, nbytes=job.plan.total_bytes):
            write_ranges(job, path_of, files)
        with (
            session.together(f"{job.call} (sync)", target.path, for_long=True, nbytes=job.plan.total_bytes),
            ThreadPoolExecutor(1, "checkpoint sync") as pool,
        ):
            syncing = pool.submit(files.sync)
            if job.checksums:
                sums = _read_back(job, path_of)
            elif session.rank == 0:
                sums = {file.name: (path_of(file.name).stat().st_size, ()) for file in plan.files}
            syncing.result()
    if not job.checksums:
        return sums
    merged: Sums = {}
    for told in session.gather_to_first(sums, job.group):
        for name, (nbytes, blocks) in told.items():  # each rank has blocks that follow those of the rank before
            merged[name] = nbytes, (*merged.get(name, (0, ()))[1], *blocks)
    return merged


def _read_back(job: WriteJob, path_of: Callable[[str], Path]) -> Sums:
    """Return the sizes of all files, and the blocks of this rank's share of them, read from the page cache."""
    plan, rank, world_size = job.plan, job.session.rank, job.session.world_size
    sums: Sums = {}
    paths = [path_of(file.name) for file in plan.files]
    nbytes = [path.stat().st_size for path in paths]
    shares = [sum(nbytes) * each // world_size for each in (rank, rank + 1)]
    begin = 0  # of a block, among the bytes of all files
    for file, path, size in zip(plan.files, paths, nbytes, strict=True):
        mine, first = list[int](), begin
        for block in file.block_sizes(size):
            if shares[0] <= begin < shares[1]:
                first = begin if not mine else first
                mine.append(block)
            begin += block
        sums[file.name] = size, tuple(blocks_of_file(LocalLocation(path), mine, first - (begin - size)))
    return sums


class WrittenFiles:
    """Files that this rank writes to; few are open at a time.

    They stay open until they are on disk: the system tells of a failed write to whoever had the file open.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def descriptor(self, path: Path) -> int:
        """Return the descriptor of a file that is there, open for writes alone."""
        if path not in self._descriptors:
            if len(self._descriptors) >= _MOST_OPEN:
                self.sync()
            self._descriptors[path] = os.open(path, os.O_WRONLY)
        return self._descriptors[path]

    def sync(self) -> None:
        """Wait until all that was written is on disk.

        Raises:
            OSError: If it could not be written there.
        """
        with ThreadPoolExecutor(_MOST_SYNCED, "checkpoint sync") as pool:
            list(pool.map(os.fsync, self._descriptors.values()))
        self.close()

    def close(self) -> None:
        """Close files as they are."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def write_ranges(job: WriteJob, path_of: Callable[[str], Path], files: WrittenFiles) -> None:
    """Write this rank's fragments at their offsets, straight from their memory; `WrittenFiles.sync` puts them on disk.

    Args:
        job: What is written. Fragments in other memory or of another dtype pass through a bucket.
        path_of: Tells under which path a file of a name was created.
        files: Where they are opened.
    """
    plan = job.plan
    buffers: deque[torch.Tensor] = deque(maxlen=2)

    def next_buffer(device: torch.device) -> torch.Tensor:
        """Return a half of the bucket; one is written while the other is filled."""
        buffers.append(buffers[0] if len(buffers) == 2 else host_buffer(job.bucket_bytes // 2, device))
        return buffers[-1]

    frames: dict[int, FileLayout] = {}
    reserved: dict[int, bool] = {}
    for ready in _when_copied(fill_buckets(job.fragments, next_buffer, copies_ready=False)):
        for fragment in ready:
            index = plan.homes[fragment.part][fragment.key]
            if index not in frames:
                frames[index] = plan.files[index].frame()
            path, offset, shape = path_of(plan.files[index].name), frames[index].offsets[fragment.key], fragment.shape
            descriptor, values = files.descriptor(path), fragment.data.reshape(-1)
            for region in regions_of(fragment.box, fragment.flat):
                memory = as_bytes(values[region.start : region.start + region.numel])
                is_strided = region.numel >= _LEAST_RUNS * runs_of(shape, region.box)[1]
                if is_strided and index not in reserved:
                    reserved[index] = reserve(descriptor, frames[index].nbytes)
                mapped = path if is_strided and reserved[index] else None
                write_box(descriptor, offset, shape, fragment.dtype.itemsize, region.box, memory, mapped)


def _when_copied(buckets: Iterable[tuple[list[Fragment], DeviceCopies | None]]) -> Iterator[list[Fragment]]:
    """Yield the fragments of each bucket when its copies have ended, while those of the next one go on."""
    held: tuple[list[Fragment], DeviceCopies] | None = None
    for fragments, copies in buckets:
        if copies is None:
            yield fragments
            continue
        if held is not None:
            held[1].wait()
            yield held[0]
        held = fragments, copies
    if held is not None:
        held[1].wait()
        yield held[0]


class LocalStream:
    """A file on a disk that is written from front to back; an older one is replaced.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._position = 0

    def write(self, values: memoryview) -> None:
        """Append bytes."""
        write_at(self._descriptor, values, self._position)
        self._position += len(values)

    def begin(self) -> None:
        """Have the disk begin with it, which is not waited for."""
        _begin(self._descriptor, 0, self._position)

    def finish(self) -> None:
        """Wait until all of it is on disk."""
        os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is; nothing happens the second time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def reserve(descriptor: int, nbytes: int) -> bool:
    """Set space aside for all of a file; return whether the file system can.

    Args:
        descriptor: The file, open for writes alone: else glibc would emulate the call by reads and writes, over what
            other ranks write.
        nbytes: Its size.

    Raises:
        OSError: If there is no space.
    """
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        return False
    except AttributeError:  # macOS has no such call
        return False
    return True


def write_box(
    descriptor: int,
    offset: int,
    shape: tuple[int, ...],
    itemsize: int,
    box: Box,
    values: memoryview,
    mapped: Path | None = None,
) -> None:
    """Write a box of a row-major tensor, next to ranks that write other boxes of it.

    Args:
        descriptor: The file.
        offset: Where the tensor's values begin, in bytes.
        shape: Shape of the whole tensor.
        itemsize: Bytes per element.
        box: The part to write; not empty.
        values: The values, row-major.
        mapped: The file's path, to write by a mapping of space that is reserved; ``None`` to write run by run.
    """
    if mapped is None:
        starts, length = runs_of(shape, box)
        nbytes = length * itemsize
        for number, start in enumerate(starts):
            write_at(descriptor, values[number * nbytes : (number + 1) * nbytes], offset + start * itemsize)
        return
    # As bytes: NumPy copies runs of them, and other elements, which are unaligned in the file, one by one.
    shape, box = (*shape, itemsize), (*box, (0, itemsize))
    source = np.ndarray(box_shape(box), dtype=np.uint8, buffer=values)
    (first, last), row_bytes = box[0], math.prod(shape[1:])
    step = max(_WINDOW_BYTES // row_bytes, 1)
    target = os.open(mapped, os.O_RDWR)
    try:
        for start in range(first, last, step):
            stop = min(start + step, last)
            begin, end = offset + start * row_bytes, offset + stop * row_bytes
            base = begin - begin % mmap.ALLOCATIONGRANULARITY
            with mmap.mmap(target, end - base, mmap.MAP_SHARED, offset=base) as mapping:
                # Not in a variable: a mapping with views can't be closed.
                np.copyto(
                    np.ndarray((stop - start, *shape[1:]), dtype=np.uint8, buffer=mapping, offset=begin - base)[
                        (slice(None), *slices_of(box[1:]))
                    ],
                    source[start - first : stop - first],
                )
    finally:
        os.close(target)


def write_at(descriptor: int, source: memoryview, offset: int) -> None:
    """Write all of ``source`` at a byte offset of a file, and have the disk begin with it, which is not waited for."""
    while source:
        written = os.pwrite(descriptor, source[:_CALL_BYTES], offset)
        if written >= _LEAST_BEGUN_BYTES:
            _begin(descriptor, offset, written)
        source = source[written:]
        offset += written


def _begin(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with a range of a file, where the system can; what fails is told by the sync at the end."""
    if _begin_range is not None:
        _begin_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def create_file(path: Path, frame: FileLayout) -> None:
    """Write a file that is complete except for the tensors' values, for which it has room; an older one is replaced.

    Its space is reserved where the file system can: it lies together then, and a full disk is found before any write.
    """
    with path.open("wb") as stream:
        for offset, content in frame.pieces:
            stream.seek(offset)
            stream.write(content)
        stream.truncate(frame.nbytes)
        stream.flush()
        reserve(stream.fileno(), frame.nbytes)
