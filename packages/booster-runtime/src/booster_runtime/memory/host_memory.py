"""Host memory outside of the C library's heap: whole pages, which files are read into; a folder; a stream of copies.

In a plan, tensors of the host stand for those of a device, and have no values.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


ALIGNMENT = 4096
"""Offsets, lengths and addresses of direct file I/O are multiples of this many bytes."""


def aligned(num_bytes: int) -> int:
    """Return a number of bytes rounded up to what direct file I/O can move."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int) -> Tensor:
    """Return zeroed memory for direct file I/O: 1-D uint8 of whole pages, given back with its last tensor."""
    pages = mmap.mmap(-1, aligned(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


_LEAST_LOCKED_BYTES = 1 << 20
"""Less than this is not worth a call of the driver."""


class _LockedPages(mmap.mmap):
    """Whole pages that CUDA devices copy from and to by themselves, until they are freed.

    Attributes:
        address: Of the first page.
        device: Index of the rank's device; the thread that frees them may have another one.
        process: Whose they are; a fork has none of them.
    """

    address: int
    device: int
    process: int

    def __del__(self) -> None:
        if sys.is_finalizing() or self.process != os.getpid():
            return
        torch.cuda.synchronize(self.device)  # nobody holds the memory, but a copy may be under way
        torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def _locked_by_cuda(num_bytes: int) -> Tensor | None:
    """Return zeroed pages that are locked by CUDA; ``None`` where it refuses."""
    pages = _LockedPages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.process, pages.device = -1, torch.cuda.current_device()
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):
                pages.madvise(getattr(mmap, advice))
    pages.address = buffer.data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(pages.address, num_bytes, 0)):  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=torch.device("cuda", pages.device))  # a launch takes the error, which would come later
        return None
    pages.process = os.getpid()
    return buffer


def locked_buffer(num_bytes: int) -> Tensor:
    """Return page-locked memory for what is kept: 1-D uint8 of whole pages, given back with its last tensor.

    torch's own allocator, which this falls back on, rounds up to a power of two, and keeps what is freed: that suits
    copies on their way, and takes up to twice the memory for what stays.

    Args:
        num_bytes: Its size, rounded up to whole pages.
    """
    length = aligned(num_bytes)
    if length >= _LEAST_LOCKED_BYTES and torch.cuda.is_available():
        locked = _locked_by_cuda(length)
        if locked is not None:
            return locked
    # Not every device's memory begins with a page.
    storage = torch.empty(length + ALIGNMENT, dtype=torch.uint8, pin_memory=True).untyped_storage()
    start = -storage.data_ptr() % ALIGNMENT
    buffer: Tensor = torch.empty(0, dtype=torch.uint8).set_(storage, start, (length,), (1,))
    return buffer


def zeros_in_pages(numel: int, dtype: torch.dtype) -> Tensor:
    """Return 1-D zeros on the CPU whose memory goes back to the system when freed; a C library's heap may keep it."""
    if not numel:
        return torch.zeros(0, dtype=dtype)
    num_bytes = numel * dtype.itemsize
    return aligned_buffer(num_bytes)[:num_bytes].view(dtype)


class OffloadFolder:
    """A folder of this host, on a disk.

    Args:
        folder: Its path.
        option: The option that named it, for errors.

    Making one touches no file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, option: str = "folder") -> None:
        self.folder = Path(folder)
        self.asked = f"`{option}='{self.folder}'`"

    def check_exists(self) -> None:
        """Check that the folder is there.

        Raises:
            ConfigError: If it is not there, or is no folder.
        """
        if not self.folder.exists():
            msg = f"{self.asked} does not exist on this host. Make the folder, or name another one."
            raise ConfigError(msg)
        if not self.folder.is_dir():
            msg = f"{self.asked} is no folder. Name one on a disk with room for the state."
            raise ConfigError(msg)

    def not_writable(self, cause: OSError) -> ConfigError:
        """Return the error for a folder in which no file can be made."""
        return ConfigError(
            f"{self.asked} can't be written to: {cause.strerror}. Change its permissions, or name another folder."
        )

    def free_bytes(self) -> int:
        """Return what this process may still write into the folder's file system, in bytes."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def take_room(self, descriptor: int, offset: int, num_bytes: int) -> None:
        """Let a file of the folder have room on the disk.

        Args:
            descriptor: The open file.
            offset: Where in it.
            num_bytes: How much.

        Raises:
            OSError: If there is none.
        """
        status = os.fstatvfs(descriptor)  # the folder itself may have been removed
        if num_bytes > status.f_bavail * status.f_frsize:
            # Trying for it, other programs would find the disk full until it has failed.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, offset, num_bytes)
            return
        block = bytes(1 << 20)  # macOS: zeros take room as anything does
        for start in range(0, num_bytes, len(block)):
            os.pwrite(descriptor, block[: num_bytes - start], offset + start)

    def told_free_bytes(self) -> str:
        """Return how many bytes are free, as a clause of an error."""
        try:
            return f"{self.free_bytes()} are free"
        except OSError as gone:
            return f"the folder can't be asked: {gone.strerror}"


class CopyStream:
    """A stream of copies and collectives in parallel to the one that computes; nothing on the CPU, which has none.

    Args:
        device: The device whose memory is copied from and to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run what the body starts after what has been started so far, and in parallel to what is started later."""
        self.wait_for_compute()
        with self.own_order():
            yield

    @contextlib.contextmanager
    def own_order(self) -> Iterator[None]:
        """Run what the body starts only after what this stream was told to wait for, such as its own earlier work.

        Memory that the body allocates is used again by this stream, once it is freed.
        """
        if self._stream is None:
            yield
            return
        # Another object for the same stream: torch 2.10 enters none that is entered already.
        ours = self._stream
        with torch.Stream(stream_id=ours.stream_id, device_index=ours.device_index, device_type=ours.device_type):
            yield

    def wait_for_compute(self) -> None:
        """Let what this stream starts later come after what has been started so far on the stream that computes."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def wait(self, event: torch.Event | None) -> None:
        """Let what this stream starts later come after an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def synchronize(self) -> None:
        """Return when everything started in this stream so far has ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def record(self) -> torch.Event | None:
        """Return an event that comes when everything started in this stream so far has ended."""
        return None if self._stream is None else self._stream.record_event()


_stands_for_device: ContextVar[bool] = ContextVar("booster host tensors of a plan", default=False)
"""Whether this thread's tensors of the host stand for those of an accelerator."""


_has_values: ContextVar[bool] = ContextVar("booster tensors with values", default=True)
"""Whether this thread's tensors have the values that were computed."""


def has_values() -> bool:
    """Return whether tensors have values, so that comparing them tells something; not in a plan."""
    return _has_values.get()


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Let nobody compare values of this thread's tensors inside, as these are never computed."""
    token = _has_values.set(False)
    try:
        yield
    finally:
        _has_values.reset(token)


def block_bytes(device: torch.device, on_host: int, on_device: int) -> int:
    """Return the size of a block.

    Args:
        device: Where the tensor is.
        on_host: For the CPU, so that a block stays in its cache.
        on_device: For an accelerator, where starting an operation takes longer than running a small one.
    """
    return on_host if device.type == "cpu" and not _stands_for_device.get() else on_device


@contextlib.contextmanager
def host_stands_for_device() -> Iterator[None]:
    """Let this thread take an accelerator's blocks of the host's tensors, which stand for its in a plan."""
    token = _stands_for_device.set(True)
    try:
        yield
    finally:
        _stands_for_device.reset(token)
