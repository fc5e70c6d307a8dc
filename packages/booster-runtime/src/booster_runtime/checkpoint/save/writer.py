"""Writes this rank's fragments at their offsets: every rank its own, or one rank for all where they share no disk."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import CheckpointError
from booster_runtime.checkpoint.files.names import SAFETENSORS
from booster_runtime.checkpoint.files.opening import container_for
from booster_runtime.checkpoint.files.raw import as_bytes, pwrite_from, reserve, write_runs, write_strided
from booster_runtime.checkpoint.save.fragments import Bucket, Fragment, fill_buckets, synchronize
from booster_runtime.state.regions import is_contiguous, regions_of, span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from booster_runtime.checkpoint.files.layout import TensorSpec
    from booster_runtime.checkpoint.save.job import JobPlan, PlannedFile


class FileWriter:
    """The files of a plan, open for writing parts of them. A context manager; leaving it closes the files.

    Args:
        plan: The plan; its files have been created.
        one_host: Whether all ranks that write run on one host. If not, files are opened write-only and written by
            ``pwrite`` only: a client of a network file system that has read a page may write all of it back, over what
            other hosts wrote to it meanwhile.
        progress: Told the number of bytes after each write.
    """

    def __init__(self, plan: JobPlan, *, one_host: bool = True, progress: Callable[[int], None] | None = None) -> None:
        self._plan = plan
        self._one_host = one_host
        self._progress = progress
        self._open: dict[int, _OpenFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            os.close(file.descriptor)
        self._open = {}

    def write(self, fragment: Fragment) -> None:
        """Write a fragment whose ``data`` is ready (see `Fragment.is_ready`)."""
        file = self._file(self._plan.homes[fragment.part][fragment.key])
        offset = file.offsets[fragment.key]
        write_box = write_strided if file.may_map else write_runs
        itemsize = fragment.dtype.itemsize
        values = fragment.data.reshape(-1)
        for region in regions_of(fragment.box, fragment.flat):
            part = values[region.start : region.start + region.numel]
            if is_contiguous(fragment.shape, region.box):
                first = offset + span_of(fragment.shape, region.box)[0] * itemsize
                pwrite_from(file.descriptor, as_bytes(part), first)
            else:
                write_box(file.descriptor, offset, fragment.shape, itemsize, region.box, part)
        if self._progress is not None:
            self._progress(fragment.nbytes)

    def sync(self) -> None:
        """Wait until what was written is on disk."""
        for file in self._open.values():
            os.fsync(file.descriptor)

    def _file(self, index: int) -> _OpenFile:
        if index not in self._open:
            file = self._plan.files[index]
            path = self._plan.temporary(file.name)
            may_map = self._one_host and reserve(path, 1)
            descriptor = os.open(path, os.O_RDWR if self._one_host else os.O_WRONLY)
            opened = _OpenFile(descriptor, may_map=may_map)
            self._open[index] = opened  # closed on exit, also if finding the offsets fails
            opened.offsets = self._offsets(file, path)
        return self._open[index]

    def _offsets(self, file: PlannedFile, path: Path) -> dict[str, int]:
        container = container_for(file.suffix)
        if self._one_host or file.suffix == SAFETENSORS:  # whose offsets are computed without a look at the file
            return container.offsets(path, file.specs, file.values)
        with tempfile.TemporaryDirectory(prefix="booster-") as folder:
            twin = Path(folder) / path.name  # sparse, and laid out alike; the name is in the file
            container.create(twin, file.specs, file.values)
            return container.offsets(twin, file.specs, file.values)


@dataclass
class _OpenFile:
    """A file open for writing.

    Args:
        descriptor: Its descriptor.
        may_map: Whether it may be written through a mapping.
        offsets: Where each tensor's values begin.
    """

    descriptor: int
    may_map: bool = field(kw_only=True)
    offsets: dict[str, int] = field(default_factory=dict)


class OneBucket:
    """The only buffer of a save, made when it is first asked for.

    Args:
        nbytes: Its size.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffer: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """Return the buffer, shape ``(nbytes,)``, uint8; what it held may be overwritten."""
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8)
        return self._buffer


def write_directly(writer: FileWriter, fragments: Iterable[Fragment], bucket: OneBucket) -> None:
    """Write fragments straight from their memory; those in other memory or of another dtype travel through the bucket.

    Collective: none.
    """
    for filled in fill_buckets(_others(writer, fragments), bucket.get):
        synchronize_devices()
        for fragment in filled.fragments:
            writer.write(fragment)


def _others(writer: FileWriter, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    """Write fragments that are ready and yield the others."""
    for fragment in fragments:
        if fragment.is_ready:
            writer.write(fragment)
        else:
            yield fragment


def synchronize_devices() -> None:
    """Wait for copies from an accelerator, where there is one."""
    if torch.accelerator.is_available():
        synchronize({torch.accelerator.current_accelerator().type})  # type: ignore[union-attr]


_DONE, _FAILED = 0, -1


def send_fragments(fragments: Iterable[Fragment], bucket: OneBucket, group: ProcessGroup, owner: int) -> None:
    """Send fragments to the rank that writes them, one bucket at a time.

    Args:
        fragments: This rank's fragments.
        bucket: Holds one message.
        group: A group with a CPU backend, used for nothing else meanwhile.
        owner: World rank of the receiver.

    Collective: this rank and the owner, which calls `receive_fragments`.
    """
    try:
        for filled in fill_buckets(fragments, bucket.get):
            synchronize_devices()
            _send_bucket(filled, group, owner)
    except Exception:
        _send_header(_FAILED, 0, group, owner)
        raise
    _send_header(_DONE, 0, group, owner)


def _send_bucket(bucket: Bucket, group: ProcessGroup, owner: int) -> None:
    import torch.distributed as dist

    content = [
        [fragment.part, fragment.key, fragment.box, fragment.flat, fragment.data.data_ptr() - bucket.buffer.data_ptr()]
        for fragment in bucket.fragments
    ]
    description = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    _send_header(description.numel(), bucket.buffer.numel(), group, owner)
    dist.send(description, dst=owner, group=group)
    dist.send(bucket.buffer, dst=owner, group=group)


def _send_header(description_bytes: int, bucket_bytes: int, group: ProcessGroup, owner: int) -> None:
    import torch.distributed as dist

    dist.send(torch.tensor([description_bytes, bucket_bytes]), dst=owner, group=group)


def receive_fragments(
    writer: FileWriter | None, plan: JobPlan, bucket: OneBucket, group: ProcessGroup, sources: Iterable[int]
) -> None:
    """Write the fragments that other ranks send, rank after rank.

    What arrives after a failure is received all the same, so that no sender waits for ever.

    Args:
        writer: The files; ``None`` drops everything.
        plan: The plan.
        bucket: Holds one message; of the size that the senders use.
        group: As in `send_fragments`.
        sources: World ranks of the senders.

    Raises:
        CheckpointError: If a sender failed.
        OSError: If writing failed.

    Collective: this rank and the sources, which call `send_fragments`.
    """
    import torch.distributed as dist

    specs = [
        {spec.key: spec for file in set(homes.values()) for spec in plan.files[file].specs} for homes in plan.homes
    ]
    buffer = bucket.get()
    header = torch.zeros(2, dtype=torch.int64)
    failure: Exception | None = None
    for source in sources:
        while True:
            dist.recv(header, src=source, group=group)
            description_bytes, used = int(header[0]), int(header[1])
            if description_bytes == _FAILED:
                failure = failure or CheckpointError(f"Rank {source} could not send its part of the checkpoint.")
            if description_bytes <= 0:
                break
            description = torch.empty(description_bytes, dtype=torch.uint8)
            dist.recv(description, src=source, group=group)
            dist.recv(buffer[:used], src=source, group=group)
            if writer is None or failure is not None:
                continue
            try:
                for fragment in _unpack(json.loads(description.numpy().tobytes()), buffer, specs):
                    writer.write(fragment)
            except Exception as error:  # noqa: BLE001 - reported when all senders are through
                failure = error
    if failure is not None:
        raise failure


def _unpack(content: Any, buffer: torch.Tensor, specs: Sequence[Mapping[str, TensorSpec]]) -> Iterator[Fragment]:
    for part, key, box, flat, offset in content:
        spec = specs[part][key]
        values = buffer[offset : offset + (flat[1] - flat[0]) * spec.dtype.itemsize].view(spec.dtype)
        yield Fragment(
            part=part,
            key=key,
            shape=spec.shape,
            dtype=spec.dtype,
            box=tuple((start, stop) for start, stop in box),
            flat=(flat[0], flat[1]),
            data=values,
        )
