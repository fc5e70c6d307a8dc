"""Saves of ranks on one host: each writes its ranges into files that rank 0 has created.

Ranks of one host may write to the same files side by side, because they share a page cache. What is in other memory or
of another dtype passes through a bucket, of which one half is written while the other is filled. Checksums are read
back from the page cache while the disk works.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from booster_checkpoint.files.checksums import blocks_of_file
from booster_checkpoint.save.fragments import fill_buckets, host_buffer
from booster_checkpoint.storage import LocalLocation
from booster_core.state import as_bytes, regions_of, runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import torch
    from typing_extensions import Self

    from booster_checkpoint.files.tensor_file import FileLayout
    from booster_checkpoint.save.fragments import DeviceCopies, Fragment
    from booster_checkpoint.save.plan import Sums, WriteJob
    from booster_checkpoint.save.targets import FolderTarget
    from booster_core.state import Box

_MAX_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB - 4 KiB per call."""
_MOST_OPEN = 32
"""How many files are open at a time, however many a save writes."""
_SYNC_BYTES = 32 << 20
"""How much of a file is written before it is sent to disk while more is written, which leaves less for the end."""
_to_disk = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


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

    with session.together(f"{job.call} (write)", target.path, for_long=True, nbytes=job.plan.total_bytes):
        paths = write_ranges(job, path_of)
    sums: Sums = {}
    with (
        session.together(f"{job.call} (sync)", target.path, for_long=True, nbytes=job.plan.total_bytes),
        ThreadPoolExecutor(1, "checkpoint sync") as pool,
    ):
        syncing = pool.submit(_sync_files, paths)
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


def write_ranges(job: WriteJob, path_of: Callable[[str], Path]) -> list[Path]:
    """Write this rank's fragments at their offsets, straight from their memory; `_sync_files` puts them on disk.

    Args:
        job: What is written. Fragments in other memory or of another dtype pass through a bucket.
        path_of: Tells under which path a file of a name was created.

    Returns:
        The files that this rank has written to.
    """
    plan = job.plan
    buffers: deque[torch.Tensor] = deque(maxlen=2)

    def next_buffer(device: torch.device) -> torch.Tensor:
        """Return a half of the bucket; one is written while the other is filled."""
        buffers.append(buffers[0] if len(buffers) == 2 else host_buffer(job.bucket_bytes // 2, device))
        return buffers[-1]

    frames: dict[int, FileLayout] = {}
    descriptors: dict[int, int] = {}
    try:
        with EarlySync() as early:
            for ready in _when_copied(fill_buckets(job.fragments, next_buffer, copies_ready=False)):
                for fragment in ready:
                    index = plan.homes[fragment.part][fragment.key]
                    if index not in frames:
                        frames[index] = plan.files[index].frame()
                    if index not in descriptors:
                        while len(descriptors) >= _MOST_OPEN:
                            os.close(descriptors.pop(next(iter(descriptors))))
                        descriptors[index] = os.open(path_of(plan.files[index].name), os.O_WRONLY)
                    offset, itemsize = frames[index].offsets[fragment.key], fragment.dtype.itemsize
                    values = fragment.data.reshape(-1)
                    for region in regions_of(fragment.box, fragment.flat):
                        memory = as_bytes(values[region.start : region.start + region.numel])
                        write_box(descriptors[index], offset, fragment.shape, itemsize, region.box, memory)
                    early.note(descriptors[index], fragment.numel * itemsize)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return [path_of(plan.files[index].name) for index in frames]


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


class EarlySync:
    """A thread that puts a file on disk each time that some more was written to it.

    The system tells of a failed write to disk once, to whoever waits for it first: `close` raises what it told here.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint early sync")
        self._running: Future[None] | None = None
        self._descriptor, self._num_bytes = -1, 0

    def note(self, descriptor: int, num_bytes: int) -> None:
        """Take note of a write.

        Args:
            descriptor: Of the file, open.
            num_bytes: How much was written.

        Raises:
            OSError: If what was written before could not be put on disk.
        """
        if descriptor != self._descriptor:
            self._descriptor, self._num_bytes = descriptor, 0
        self._num_bytes += num_bytes
        if self._num_bytes < _SYNC_BYTES or (self._running is not None and not self._running.done()):
            return
        self._settle()
        self._num_bytes = 0
        self._running = self._pool.submit(_sync, os.dup(descriptor))  # the writer may close its own meanwhile

    def close(self) -> None:
        """Wait for what is under way.

        Raises:
            OSError: As `note` does.
        """
        self._pool.shutdown()
        self._settle()

    def abandon(self) -> None:
        """Wait for what is under way, whatever comes of it."""
        self._pool.shutdown()

    def _settle(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.abandon() if kind is not None else self.close()


class LocalStream:
    """A file on a disk that is written from front to back; an older one is replaced.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._early = EarlySync()
        self._position = 0

    def write(self, values: memoryview) -> None:
        """Append bytes."""
        write_at(self._descriptor, values, self._position)
        self._position += len(values)
        self._early.note(self._descriptor, len(values))

    def finish(self) -> None:
        """Wait until all of it is on disk."""
        self._early.close()
        os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is; nothing happens the second time."""
        self._early.abandon()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        _to_disk(descriptor)
    finally:
        os.close(descriptor)


def _sync_files(paths: Iterable[Path]) -> None:
    """Wait until what was written to files is on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_box(
    descriptor: int, offset: int, shape: tuple[int, ...], itemsize: int, box: Box, values: memoryview
) -> None:
    """Write a box of a row-major tensor, run by run, next to ranks that write other boxes of it.

    Args:
        descriptor: The file.
        offset: Where the tensor's values begin, in bytes.
        shape: Shape of the whole tensor.
        itemsize: Bytes per element.
        box: The part to write; not empty.
        values: The values, row-major.
    """
    starts, length = runs_of(shape, box)
    nbytes = length * itemsize
    for number, start in enumerate(starts):
        write_at(descriptor, values[number * nbytes : (number + 1) * nbytes], offset + start * itemsize)


def write_at(descriptor: int, source: memoryview, offset: int) -> None:
    """Write all of ``source`` at a byte offset of a file."""
    while source:
        written = os.pwrite(descriptor, source[:_MAX_CALL_BYTES], offset)
        source = source[written:]
        offset += written


def create_file(path: Path, frame: FileLayout) -> None:
    """Write a file that is complete except for the tensors' values, for which it has room; an older one is replaced."""
    with path.open("wb") as stream:
        for offset, content in frame.pieces:
            stream.seek(offset)
            stream.write(content)
        stream.truncate(frame.nbytes)
