"""What autograd saves of some modules' calls, in page-locked memory of the host until backward needs it.

A device copies to the host in a stream of its own while it computes on, and back before it is needed: when backward
reaches a call, what the call before it has saved begins to come back. Memory is copied by storages, because several
tensors that are saved are often views of one, or the same. So that the device doesn't hold more than it would without,
forward waits, on the device, for the copies of the call before the last one.
Reference: Rhu et al. 2016, "vDNN: Virtualized Deep Neural Networks" (arXiv:1602.08124).
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from booster_runtime.memory import CopyStream
from booster_runtime.saved_tensors import SavedTensorHooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LEAST_BYTES = 1 << 20
"""Smaller tensors stay on the device: a copy of its own costs more time than they are worth."""
_IN_FLIGHT = 1
"""Calls whose copies forward does not wait for."""


class ActivationOffload(SavedTensorHooks):
    """Keeps on the host what modules save, all of those that share this object.

    Args:
        least_bytes: Storages of fewer bytes stay on the device.
    """

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        super().__init__()
        self._least_bytes = least_bytes
        self._copy_stream: CopyStream | None = None
        self._calls: list[_Call] = []
        self._last: weakref.ref[_Call] | None = None
        self._coming_back: weakref.ref[_Call] | None = None
        self._in_flight: deque[_Leaving] = deque()
        self._copies: weakref.WeakValueDictionary[tuple[StorageWeakRef, int], _Copy] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[type[ActivationOffload], tuple[int]]:
        """Let a copy of a module have hooks of its own: what is saved belongs to a graph, which is not copied."""
        return ActivationOffload, (self._least_bytes,)

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module's forward, and keep on the host what is saved in it, but for its parameters and buffers."""
        if not self._begin(module):
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        finally:
            self._end()

    # What is saved in a compiled forward passes hooks as it does without; the hooks themselves can't be traced.
    run = _disable_dynamo(run, recursive=False)

    @_disable_dynamo
    def _begin(self, module: nn.Module) -> bool:
        if not self.push():
            return False
        tensors = (*module.parameters(), *module.buffers())
        stay = {each.untyped_storage().data_ptr() for each in tensors if each.layout is torch.strided}
        self._calls.append(_Call(stay, self._last))
        self._wait_for_copies(_IN_FLIGHT)
        return True

    @_disable_dynamo
    def _end(self) -> None:
        self.pop()
        call = self._calls.pop()
        self._last = weakref.ref(call)
        if call.leaving:
            assert self._copy_stream is not None, "something has been copied"
            self._in_flight.append(_Leaving(call.leaving, self._copy_stream.record()))
            call.leaving = []

    def take(self, tensor: Tensor) -> _Saved | None:
        """Begin to copy a tensor's memory to the host, unless it stays."""
        if not self._is_taken(tensor):
            return None
        call = self._calls[-1]
        # Views share the count of changes in place, so equal memory and count mean equal values.
        reference: StorageWeakRef = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        key = reference, tensor._version  # noqa: SLF001 - as autograd's own check
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = self._leave(tensor, call)
        call.copies.append(weakref.ref(copy))
        return _Saved(copy, call, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def give(self, taken: _Saved) -> Tensor:
        """Return a tensor's values on the device, when they have come back."""
        if self._coming_back is None or self._coming_back() is not taken.call:
            self._begin_backward_of(taken.call)
        assert self._copy_stream is not None, "something has been copied"
        whole = taken.copy.on_device(self._copy_stream)
        found = torch.empty(0, dtype=taken.dtype, device=whole.device)
        return found.set_(whole.untyped_storage(), taken.offset, taken.shape, taken.strides)

    def _is_taken(self, tensor: Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type == "cpu":
            return False
        if not self._calls or tensor.is_conj() or tensor.is_neg() or (tensor.is_leaf and tensor.requires_grad):
            return False
        if isinstance(tensor._base, nn.Parameter):  # noqa: SLF001 - a view of one that an inner unit has gathered
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._least_bytes and storage.data_ptr() not in self._calls[-1].stay

    def _leave(self, tensor: Tensor, call: _Call) -> _Copy:
        if self._copy_stream is None:
            self._copy_stream = CopyStream(tensor.device)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
        with self._copy_stream.after_compute():
            host.copy_(whole, non_blocking=True)
        call.leaving.append(whole)
        return _Copy(host, whole.device)

    def _wait_for_copies(self, but: int) -> None:
        """Let the device wait for copies of all calls but the latest, and give their memory back."""
        while len(self._in_flight) > but:
            leaving = self._in_flight.popleft()
            if leaving.event is not None:
                torch.accelerator.current_stream(leaving.tensors[0].device).wait_event(leaving.event)

    def _begin_backward_of(self, call: _Call) -> None:
        """Bring back what a call and the one before it have saved, and let go of what another call has used."""
        assert self._copy_stream is not None, "something has been copied"
        self._wait_for_copies(0)
        done = self._coming_back() if self._coming_back is not None else None
        if done is not None:
            done.held = []
        self._coming_back = weakref.ref(call)
        for each in (call, call.previous() if call.previous is not None else None):
            if each is not None and not each.held:
                copies = [copy for copy in (saved() for saved in each.copies) if copy is not None]
                each.held = [copy.begin(self._copy_stream) for copy in dict.fromkeys(copies)]


class _Call:
    """What one call of a module has saved.

    Args:
        stay: Addresses of memory that isn't copied.
        previous: The call before this one, while backward may still come to it.
    """

    def __init__(self, stay: set[int], previous: weakref.ref[_Call] | None) -> None:
        self.stay = stay
        self.previous = previous
        self.copies: list[weakref.ref[_Copy]] = []
        self.leaving: list[Tensor] = []
        self.held: list[Tensor] = []


class _Copy:
    """A storage's values on the host.

    Args:
        host: As bytes.
        device: Where they are needed.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host = host
        self._device = device
        self._back: weakref.ref[Tensor] | None = None
        self._event: torch.Event | None = None

    def begin(self, copy_stream: CopyStream) -> Tensor:
        """Return memory of the device that the values come to; see `on_device`."""
        whole = self._back() if self._back is not None else None
        if whole is None:
            # Allocated in the copy stream, which never writes before what computes has come as far as now: freed memory
            # is used for the next copy at once. `record_stream` would hold it until the host sees this copy's end.
            with copy_stream.after_compute():
                whole = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
                whole.copy_(self._host, non_blocking=True)
            self._back, self._event = weakref.ref(whole), copy_stream.record()
        return whole

    def on_device(self, copy_stream: CopyStream) -> Tensor:
        """Return the values, which what the device computes from now on waits for."""
        whole = self.begin(copy_stream)
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)
        return whole


@dataclass(frozen=True)
class _Leaving:
    """Memory of the device that is being copied, until an event."""

    tensors: list[Tensor]
    event: torch.Event | None


@dataclass(frozen=True)
class _Saved:
    """What autograd saves in a tensor's place."""

    copy: _Copy
    call: _Call
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: Any
