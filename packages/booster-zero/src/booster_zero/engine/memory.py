"""Where a rank's slices of buckets are kept: on the device, or on the host; and tensors that follow them.

A `FlatBuffer` is what one bucket keeps of one role. Tensors that others hold, such as those that the optimizer steps
on, are views of it and stay the same objects wherever its memory is. A `Memory` keeps each buffer where it was made. A
subclass may move buffers between memories: buckets say when they use one and when they have done so; in between, it
may be in another memory, or on a disk.

Gathered values are in buffers of a `BufferPool`. New memory costs the CPU as much as a copy: each page of it is cleared
on its first use. Whether a buffer is free is told by its storage's reference count: autograd, or anybody else, may
still hold views of it after its bucket was released.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_runtime.collectives import Pending
from booster_runtime.memory import CopyStream, locked_buffer, zeros_in_pages

if TYPE_CHECKING:
    from torch import Tensor

    from booster_core.errors import OffloadError


class Role(enum.Enum):
    """What a buffer holds of a bucket: this rank's slice of something."""

    __hash__ = object.__hash__  # which calls no Python
    PARAM = "param"
    """Working values."""
    GRAD = "grad"
    """Gradients, where the optimizer steps."""
    OPTIM = "optim"
    """What the optimizer updates where that is a copy, and its elementwise state, as bytes."""


Key = tuple[int, Role]
"""Names a buffer: a number that no other bucket has, and the role."""


class FlatBuffer:
    """One flat tensor, wherever it is, and the tensors that are views of it.

    Args:
        number: Of the bucket.
        role: What it holds.
        tensor: Its memory, 1-D.

    Attributes:
        key: Number and role.
        tensor: The values; a placeholder of their shape, which takes no memory, where they are not here.
        parts: Views that the owner has made of the values, as long as these stay where they are.
    """

    def __init__(self, number: int, role: Role, tensor: Tensor) -> None:
        self.key: Key = number, role
        self.tensor = tensor
        self.parts: dict[int, Tensor] = {}
        self._views: list[tuple[Tensor, int]] = []
        self._arrival: torch.Event | None = None

    @property
    def device(self) -> torch.device:
        """Where the values are used."""
        return self.tensor.device

    @property
    def num_bytes(self) -> int:
        """What the values take, in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def part(self, like: Tensor, start_bytes: int) -> Tensor:
        """Return what begins at a byte, in the shape and format of another tensor."""
        end = start_bytes + like.numel() * like.element_size()
        return self.tensor.view(torch.uint8)[start_bytes:end].view(like.dtype).view(like.shape)

    def add_view(self, view: Tensor, start_bytes: int) -> None:
        """Let a tensor be a view of this buffer from now on, from a byte on; it takes the values that are there."""
        self._views.append((view, start_bytes))
        _assign(view, self.part(view, start_bytes))

    def drop_views(self) -> None:
        """Let the views be tensors of their own, or of another buffer."""
        self._views = []

    def point(self, tensor: Tensor | None) -> None:
        """Use other memory for the buffer and its views; ``None`` where the values are not here."""
        self.tensor = _placeholder(self.tensor) if tensor is None else tensor
        self.parts = {}
        for view, start_bytes in self._views:
            _assign(view, _placeholder(view) if tensor is None else self.part(view, start_bytes))

    def note_arrival(self, event: torch.Event | None) -> None:
        """Let the next use wait for a copy into this buffer."""
        self._arrival = event

    def arrive(self) -> None:
        """Let what is computed from now on come after copies into this buffer: on a device by its stream."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None and self.device.type == "cpu":
            arrival.synchronize()
        elif arrival is not None:
            arrival.wait()


class Memory:
    """Keeps buffers where they were made.

    Attributes:
        moves: Whether a buffer may ever be moved. Where it may not, buckets don't announce their uses.
        pins: Whether copies on the host are page-locked, so that an accelerator makes them by itself.

    Collective: none of its methods; ranks need not do the same.
    """

    moves: bool = False
    pins: bool = True

    def __init__(self) -> None:
        self._problem: OffloadError | None = None
        self._copy_streams: dict[tuple[str, bool], CopyStream] = {}

    def copy_stream(self, device: torch.device, *, up: bool) -> CopyStream:
        """Return the stream of all copies from the host to a device (``up``), or of all from it to the host.

        One for each: a device has few streams and keeps freed memory apart for each, and copies in one direction run
        one after the other anyway.
        """
        key = device.type, up  # a rank has one device, with its number or without
        if key not in self._copy_streams:
            self._copy_streams[key] = CopyStream(device)
        return self._copy_streams[key]

    def problem(self) -> OffloadError | None:
        """Return what has gone wrong since the last call, such as a full disk; it has done no harm to any values."""
        problem, self._problem = self._problem, None
        return problem

    # ---- buffers

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device, compute: torch.device) -> Tensor:
        """Return 1-D zeros for a buffer that is added next; page-locked on the host of an accelerator.

        Args:
            numel: Number of elements.
            dtype: Their format.
            device: Where they are.
            compute: Where forward runs.
        """
        if self.moves:  # `add` takes the values into memory of its own
            return torch.zeros(numel, dtype=dtype, device=device)
        if device.type == compute.type == "cpu":
            return zeros_in_pages(numel, dtype)
        num_bytes = numel * dtype.itemsize
        if device.type == "cpu" and num_bytes and self.pins:
            return locked_buffer(num_bytes)[:num_bytes].zero_().view(dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def add(self, buffer: FlatBuffer) -> None:
        """Take over a buffer, which is not in use then.

        A memory that moves it calls `FlatBuffer.point`, on the training thread within another method.
        """

    def drop(self, buffer: FlatBuffer) -> None:
        """Forget a buffer altogether."""

    def step_device(self, number: int, num_bytes: int, preferred: torch.device) -> torch.device:
        """Return where a bucket's optimizer state is stepped on, and its gradient is kept for that.

        Args:
            number: Of the bucket.
            num_bytes: What the state takes; 0 to ask for what was answered before.
            preferred: Where it is stepped on if that makes no difference.
        """
        del number, num_bytes
        return preferred

    def fetch(self, buffer: FlatBuffer) -> Pending:
        """Begin a use. After ``wait()`` the buffer stays where it can be computed with until `release`.

        Parameters are on the device then; gradients and optimizer state there or on the host. Uses are counted.
        """
        return Pending(finish=buffer.arrive)

    def release(self, buffer: FlatBuffer, *, changed: bool) -> None:
        """End a use.

        Args:
            buffer: The buffer.
            changed: Whether it has been written to.
        """

    def forget(self, buffer: FlatBuffer) -> None:
        """Discard a buffer's values: the next use begins without."""

    def write(self, buffer: FlatBuffer, values: Tensor, *, accumulate: bool = False) -> Pending:
        """Start setting a buffer, or adding to it, from values of another device, while that computes.

        The buffer's next use finds them.

        Args:
            buffer: The buffer, wherever it is; in no use that reads it.
            values: 1-D, of its length; to a buffer on the host in its format, and they may be changed.
            accumulate: Whether to add; the buffer is on the host then. The sum is made on the device, so that the host
                neither waits nor computes.

        Returns:
            What to wait for before ``values`` are changed.
        """
        if buffer.device.type == "cpu":
            return self._write_down(buffer, values, accumulate=accumulate)
        stream = self.copy_stream(buffer.device, up=True)
        self.fetch(buffer).wait()
        if values.dtype != buffer.tensor.dtype:
            values = torch.empty_like(values, dtype=buffer.tensor.dtype, pin_memory=self.pins).copy_(values)
        with stream.after_compute():
            buffer.tensor.copy_(values, non_blocking=True)
            copied = stream.record()
        self.note_arrival(buffer, copied)
        self.release(buffer, changed=True)
        return Pending(finish=None if copied is None else copied.synchronize, keep=values)

    def _write_down(self, buffer: FlatBuffer, values: Tensor, *, accumulate: bool) -> Pending:
        stream = self.copy_stream(values.device, up=False)
        with stream.after_compute():  # and after earlier copies into the buffer
            if accumulate:
                values.add_(buffer.tensor.to(values.device, non_blocking=True))
            buffer.tensor.copy_(values, non_blocking=True)
            copied = stream.record()
        buffer.note_arrival(copied)
        # The memory of `values` is used again by what is computed after the copy.
        return Pending(finish=None if copied is None else copied.wait, keep=values)

    def note_arrival(self, buffer: FlatBuffer, event: torch.Event | None) -> None:
        """Let the next use of a buffer on a device, which is in use, come after a copy."""
        buffer.note_arrival(event)

    # ---- what else a budget holds

    def reserve(self, num_bytes: int) -> None:
        """Count device memory that is taken for what is not a buffer."""

    def free(self, num_bytes: int) -> None:
        """Count reserved memory as given back."""

    def moment(self, name: str) -> None:
        """Note what the model is doing, such as a module's name; for messages and pictures."""

    def end_step(self) -> None:
        """Note that an optimizer step has ended."""


def _assign(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor object have other memory, also of another device, to which ``.data`` can't always go."""
    if tensor.device.type == values.device.type:
        tensor.data = values
        return
    values = values.data  # which does not keep what it is a view of, once the tensor has other memory
    other = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _placeholder(like: Tensor) -> Any:
    """Return a tensor of the same shape, format and device that takes one element of memory."""
    filler = float("nan") if like.is_floating_point() else 0
    return torch.full((), filler, dtype=like.dtype, device=like.device).expand(like.shape)


_use_count: Any = torch._C._storage_Use_Count  # noqa: SLF001 - as torch's own CUDA graphs ask; it has no public name
_OWN_REFERENCES = 2
"""A tensor that is asked of, and the storage object through which that is done."""

_LARGEST_FIT = 1.5
"""How many times as large as needed a buffer may be."""


class BufferPool:
    """Lends 1-D buffers.

    Args:
        least_bytes: What a buffer has at least on the CPU, so that those of buckets that are not quite full can take
            each other's place. What is not touched takes no memory.
        most_idle_bytes: Idle memory beyond this is given back to the system, the largest buffers first.

    Attributes:
        most_idle_bytes: As given; it may be changed.
    """

    def __init__(self, least_bytes: int, most_idle_bytes: int = 0) -> None:
        self._least_bytes = least_bytes
        self.most_idle_bytes = most_idle_bytes
        self._idle: list[tuple[int, torch.UntypedStorage]] = []
        self._idle_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer with arbitrary values, shape ``(numel,)``; outside of inference mode, and without gradients.

        Memory that is allocated under inference mode could not be used in training later.
        """
        if device.type != "cpu":  # torch's allocators for accelerators keep memory themselves
            return torch.empty(numel, dtype=dtype, device=device)
        needed = numel * dtype.itemsize
        length = max(needed, self._least_bytes)
        chosen, chosen_bytes = -1, _LARGEST_FIT * length
        for position, (num_bytes, storage) in enumerate(self._idle):
            if length <= num_bytes <= chosen_bytes and _use_count(storage._cdata) == 1:  # noqa: SLF001 - as in `is_free`
                chosen, chosen_bytes = position, num_bytes - 1
        if chosen < 0:
            return torch.empty(length, dtype=torch.uint8)[:needed].view(dtype)
        taken: Tensor = torch.empty(0, dtype=dtype).set_(self._pop(chosen), 0, (numel,), (1,))
        return taken

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. Others may still read it; it is lent again when they don't."""
        if buffer.device.type != "cpu":
            return
        storage = buffer.untyped_storage()
        num_bytes = storage.nbytes()
        self._idle.append((num_bytes, storage))
        self._idle_bytes += num_bytes
        while self._idle_bytes > self.most_idle_bytes:
            sizes = [each for each, _ in self._idle]
            self._pop(sizes.index(max(sizes)))

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        self._idle.clear()
        self._idle_bytes = 0

    def _pop(self, position: int) -> torch.UntypedStorage:
        num_bytes, storage = self._idle.pop(position)
        self._idle_bytes -= num_bytes
        return storage


def is_free(buffer: Tensor) -> bool:
    """Return whether a buffer's memory is referred to by this tensor alone."""
    storage = buffer.untyped_storage()
    return int(_use_count(storage._cdata)) == _OWN_REFERENCES  # noqa: SLF001
