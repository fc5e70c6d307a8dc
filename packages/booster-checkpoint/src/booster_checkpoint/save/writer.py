"""From memory to files: fragments of tensors, the bucket that carries some of them, and the files that they go to.

A file is laid out before its values exist, so that a fragment is written at its offset as it comes, straight from
memory where that holds the very bytes. What lies elsewhere or in another dtype passes through one bucket.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from booster_checkpoint.files.layout import SAFETENSORS
from booster_checkpoint.files.safetensors_file import (
    DTYPE_NAMES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    METADATA,
    VALUES_PREFIX,
)
from booster_core.errors import BoosterError, CheckpointError
from booster_core.state import as_bytes, is_contiguous, pack, regions_of, span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from booster_checkpoint.files.layout import PlannedFile, SavePlan, TensorSpec
    from booster_core.state import Box

_MAX_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB - 4 KiB per call."""
_MOST_OPEN = 32
"""How many files are open at a time, however many a save writes."""
_SYNC_BYTES = 32 << 20
"""How much of a file is written before it is sent to disk while more is written, which leaves less for the end."""
_to_disk = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
_ALIGNMENT = 64
"""Of copies, in bytes: a copy to memory that is aligned to its elements only takes a quarter longer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fragment:
    """Some values of one tensor, and where they belong.

    Args:
        part: Position of the part in the save.
        key: The tensor's name in the file.
        shape: Shape of the whole tensor.
        dtype: Element type in the file.
        box: The index range that the values were cut from.
        flat: The range of the flattened box that they are.
        data: The values, of any shape, strides, dtype and device; their row-major order is that of ``flat``.
    """

    part: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    flat: tuple[int, int]
    data: torch.Tensor

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.flat[1] - self.flat[0]

    @property
    def is_ready(self) -> bool:
        """Whether the memory of ``data`` holds the very bytes to be written."""
        data = self.data
        is_plain = data.device.type == "cpu" and data.dtype == self.dtype and data.is_contiguous()
        return is_plain and not data.is_conj() and not data.is_neg()


def fill_buckets(
    fragments: Iterable[Fragment], next_buffer: Callable[[], torch.Tensor], *, copies_ready: bool
) -> Iterator[list[Fragment]]:
    """Yield fragments that are ready to be written, once `synchronize_devices` has been called.

    They are views of buffers, cut where a buffer was full.

    Args:
        fragments: Read one at a time; a fragment is not touched after the next one was asked for.
        next_buffer: Returns an empty uint8 buffer on the CPU, at least 16 bytes long. It is asked for one when the
            last one has been handed on, so it may return the same one again.
        copies_ready: Copy fragments that are ready, too. ``False`` yields them as they are, one at a time.
    """
    buffer: torch.Tensor | None = None
    used, held = 0, list[Fragment]()
    for fragment in fragments:
        if not copies_ready and fragment.is_ready:
            yield [fragment]
            continue
        done, itemsize = 0, fragment.dtype.itemsize
        while done < fragment.numel:
            if buffer is None:
                buffer, used, held = next_buffer(), 0, []
            used += -used % _ALIGNMENT
            count = min(fragment.numel - done, (buffer.numel() - used) // itemsize)
            if count <= 0:
                yield held
                buffer = None
                continue
            values = buffer[used : used + count * itemsize].view(fragment.dtype)
            pack(fragment.data, done, done + count, values, non_blocking=True)
            start = fragment.flat[0] + done
            held.append(replace(fragment, flat=(start, start + count), data=values))
            used += count * itemsize
            done += count
    if buffer is not None and held:
        yield held


def synchronize_devices() -> None:
    """Wait for copies from an accelerator, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def write_directly(
    plan: SavePlan, fragments: Iterable[Fragment], bucket_bytes: int, progress: Callable[[int], None]
) -> list[Path]:
    """Write this rank's fragments at their offsets, straight from their memory; `sync_files` puts them on disk.

    Ranks of one host may write to the same files side by side, because they share a page cache.

    Args:
        plan: The plan; its files have been created.
        fragments: Those in other memory or of another dtype pass through a bucket.
        bucket_bytes: Size of the bucket.
        progress: Told the number of bytes after each write.

    Returns:
        The files that this rank has written to.
    """
    buffers: list[torch.Tensor] = []

    def the_buffer() -> torch.Tensor:
        if not buffers:
            buffers.append(torch.empty(bucket_bytes, dtype=torch.uint8))
        return buffers[0]

    offsets: dict[int, dict[str, int]] = {}
    descriptors: dict[int, int] = {}
    try:
        with EarlySync() as early:
            for ready in fill_buckets(fragments, the_buffer, copies_ready=False):
                synchronize_devices()
                for fragment in ready:
                    index = plan.homes[fragment.part][fragment.key]
                    path = plan.temporary(plan.files[index].name)
                    if index not in offsets:
                        offsets[index] = offsets_in(path, plan.files[index])
                    if index not in descriptors:
                        while len(descriptors) >= _MOST_OPEN:
                            os.close(descriptors.pop(next(iter(descriptors))))
                        descriptors[index] = os.open(path, os.O_WRONLY)
                    _write_fragment(path, descriptors[index], offsets[index][fragment.key], fragment)
                    num_bytes = fragment.numel * fragment.dtype.itemsize
                    early.note(descriptors[index], num_bytes)
                    progress(num_bytes)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return [plan.temporary(plan.files[index].name) for index in offsets]


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


def _sync(descriptor: int) -> None:
    try:
        _to_disk(descriptor)
    finally:
        os.close(descriptor)


def sync_files(paths: Iterable[Path]) -> None:
    """Wait until what was written to files is on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_fragment(path: Path, descriptor: int, offset: int, fragment: Fragment) -> None:
    """Write a fragment that is ready into the tensor whose values begin at an offset."""
    itemsize, shape = fragment.dtype.itemsize, fragment.shape
    values = fragment.data.reshape(-1)
    for region in regions_of(fragment.box, fragment.flat):
        memory = as_bytes(values[region.start : region.start + region.numel])
        if is_contiguous(shape, region.box):
            write_at(descriptor, memory, offset + span_of(shape, region.box)[0] * itemsize)
        else:
            from booster_checkpoint.save.strided import write_strided

            write_strided(path, offset, shape, itemsize, region.box, memory)


def write_at(descriptor: int, source: memoryview, offset: int) -> None:
    """Write all of ``source`` at a byte offset of a file."""
    while source:
        written = os.pwrite(descriptor, source[:_MAX_CALL_BYTES], offset)
        source = source[written:]
        offset += written


def write_text(path: Path, text: str) -> None:
    """Write a small file and wait until it is on disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def create_file(path: Path, file: PlannedFile) -> None:
    """Write a file that is complete except for the tensors' values, for which it has room; an older one is replaced."""
    if file.suffix == SAFETENSORS:
        head = _safetensors_head(file.specs, file.values)
        with path.open("wb") as stream:
            stream.write(head)
            stream.truncate(len(head) + sum(spec.nbytes for spec in file.specs))
    else:
        from booster_checkpoint.files.torch_file import create_torch_file

        create_torch_file(path, file.specs, file.values)


def offsets_in(path: Path, file: PlannedFile) -> dict[str, int]:
    """Return where in a file that was created each tensor's values begin, in bytes."""
    if file.suffix != SAFETENSORS:
        from booster_checkpoint.files.torch_file import offsets_in_torch_file

        return offsets_in_torch_file(path, file.specs)
    offset = len(_safetensors_head(file.specs, file.values))
    offsets = {}
    for spec in file.specs:
        offsets[spec.key] = offset
        offset += spec.nbytes
    return offsets


def _safetensors_head(specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> bytes:
    """Return what precedes the values in a safetensors file: the header's length and the header."""
    metadata = {"format": "pt", **{VALUES_PREFIX + name: json.dumps(value) for name, value in values.items()}}
    header: dict[str, Any] = {METADATA: metadata}
    offset = 0
    for spec in specs:
        if spec.dtype not in DTYPE_NAMES:
            msg = (
                f"'{spec.key}' has dtype {spec.dtype}, which safetensors files cannot hold. Use "
                "`use_safetensors=False`."
            )
            raise CheckpointError(msg)
        header[spec.key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        msg = (
            f"The names of {len(specs)} tensors and {len(values)} other values make a header of {len(text)} bytes; a "
            f"safetensors file takes {MAX_HEADER_BYTES}. Use `shard=True` or a smaller `size_per_shard`."
        )
        raise CheckpointError(msg)
    return struct.pack("<Q", len(text)) + text


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a loss of power."""
    sync_files([folder])


def as_checkpoint_error(error: Exception, path: object) -> Exception:
    """Return an error of the operating system as one that says what it means for a checkpoint."""
    if isinstance(error, BoosterError) or not isinstance(error, OSError):
        return error
    remedies = {
        errno.ENOSPC: "The disk is full: free some space, or save elsewhere.",
        errno.EDQUOT: "The disk quota is used up: free some space, or save elsewhere.",
        errno.EACCES: "Permission is denied: check the folder's owner and mode.",
        errno.EPERM: "Permission is denied: check the folder's owner and mode.",
        errno.EROFS: "The file system is read-only: save elsewhere.",
        errno.EEXIST: "A part of the path is a file, not a folder: pass another path.",
        errno.ENOTDIR: "A part of the path is a file, not a folder: pass another path.",
    }
    where = error.filename or path
    reason = error.strerror or str(error)
    remedy = remedies.get(error.errno or 0, "")
    failure = CheckpointError(f"'{path}' cannot be written: {reason} ('{where}'). {remedy}".rstrip())
    failure.__cause__ = error
    return failure
