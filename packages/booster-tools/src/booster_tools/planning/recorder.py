"""`StepRecorder`: what a rank holds, sends and computes in a step, whether it computes or a plan leaves that out."""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.plugin import unwrap_model
from booster_core.ranks import observed_by
from booster_runtime.memory import is_absent
from booster_runtime.sharding import local_of
from booster_tools.planning.collectives import call_collective, call_functional
from booster_tools.planning.meta_executor import MetaExecutor, Operation, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import UntypedStorage

    from booster_core import Boosted
    from booster_core.ranks import ObservedCall

_PHASES = ("forward", "backward", "step")


@dataclass
class Traffic:
    """Calls of one kind of collective.

    Args:
        calls: How many.
        payload_bytes: Size of the whole buffers that they worked on.
        sent_bytes: What this rank sends for them by a bandwidth-optimal algorithm.
    """

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0


class StateBytes(NamedTuple):
    """What stays at the end of a step, before gradients are dropped, in bytes.

    Args:
        parameters: Parameters, buffers and master copies.
        gradients: Gradients.
        optimizer: State of the optimizer.
        others: What else lives, such as communication buckets.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    others: int = 0


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that are alive, collectives and floating point operations of what a thread runs inside.

    Args:
        computes: Whether all is run, as in training, or only what is small.
        is_alone: Whether the other ranks of the world are not there, so that collectives are answered.

    Attributes:
        live_bytes: Size of the storages that are alive.
        peak_bytes: The largest that was since `start_step`.
        most_bytes: The largest that ever was.
        flops: Floating point operations since `start_step`.
        traffic: Collectives since `start_step`, by kind.
        kept_bytes: What a forward keeps for its backward, of the first one since `start_step`.
        peak_of_gradients: The peak since `start_step` when the optimizer began to step.
        state: What stayed at the end of the last step of the objects that `watch` was told.
        thread: The one that is counted, by number.
    """

    def __init__(self, *, computes: bool, is_alone: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computes, self.is_alone = computes, is_alone
        self.live_bytes = self.peak_bytes = self.most_bytes = self.flops = 0
        self.traffic: dict[str, Traffic] = {}
        self.kept_bytes: int | None = None
        self.peak_of_gradients = self._live_before = 0
        self.state = StateBytes()
        self.thread = threading.get_ident()
        self._phase = ""
        self._watched: Boosted | None = None
        self._is_quiet = False
        self._storages: dict[int, tuple[weakref.ref[UntypedStorage], int, str]] = {}
        self._unknown: set[int] = set()
        self._operations: dict[Any, Operation] = {}
        self._skipping = None if computes else MetaExecutor(self.is_unknown)

    def start_step(self) -> None:
        """Begin to count a step."""
        self.peak_bytes = self._live_before = self.live_bytes
        self.kept_bytes, self.peak_of_gradients = None, 0
        self.flops = 0
        self.traffic = {}

    def communicate(self, kind: str, payload_bytes: int, sent_bytes: int) -> None:
        """Count a collective, unless it is part of one that is counted as a whole."""
        if not self._is_quiet:
            entry = self.traffic.setdefault(kind, Traffic())
            entry.calls += 1
            entry.payload_bytes += payload_bytes
            entry.sent_bytes += sent_bytes

    def watch(self, boosted: Boosted) -> None:
        """Sort what lives after each step of boosted objects."""
        self._watched, self._phase = boosted, "forward"

    @contextlib.contextmanager
    def during(self, call: ObservedCall) -> Iterator[None]:
        """Take storages that a call makes for its phase's, and a collective for a whole, whatever is sent for it."""
        if threading.get_ident() != self.thread:
            yield
            return
        phase, is_quiet = self._phase, self._is_quiet
        if call.group is not None and dist.get_world_size(call.group) > 1:
            if call.payload_bytes:  # the wait for it has none, and objects are not counted, as their sizes differ
                self.communicate(call.name, call.payload_bytes, call.sent_bytes)
            self._is_quiet = True
        elif phase and call.name in _PHASES:
            self._phase = call.name
            if call.name == "backward" and self.kept_bytes is None:
                self.kept_bytes = self.live_bytes - self._live_before
            elif call.name == "step":
                self.peak_of_gradients = self.peak_of_gradients or self.peak_bytes
        try:
            yield
            if call.name == "step" and self._watched is not None:
                self._sort(self._watched)
        finally:
            self._phase, self._is_quiet = phase, is_quiet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or find out what it would return, and count it."""
        kwargs = kwargs or {}
        if types:  # of tensors that dispatch themselves
            if any(issubclass(each, FakeTensor) for each in types):
                return func(*args, **kwargs)  # torch's DTensor asks them for shapes
            if any(
                issubclass(each, Tensor) and each.__torch_dispatch__ is not Tensor.__torch_dispatch__ for each in types
            ):
                return NotImplemented  # a wrapper, whose operations on the tensors inside come here in turn
        operation = self._operations.get(func)
        if operation is None:
            operation = self._operations[func] = Operation(func)
        if operation.is_collective:
            return call_collective(func, args, kwargs, self)
        answer = call_functional(func, args, kwargs, self) if operation.is_functional_collective else None
        if answer is not None:
            self._note_all(answer, is_unknown=False)
            return answer
        given = tensors_in(args)
        if kwargs:
            given += tensors_in(kwargs.values())
        is_meta = any(leaf.is_meta for leaf in given)
        is_unknown = False
        if self._skipping is None or is_meta or (kwargs and str(kwargs.get("device")) == "meta"):
            out = func(*args, **kwargs)
        else:
            out, is_unknown = self._skipping.result(func, operation, args, kwargs, given)
        if operation.flops is not None and not is_meta:
            self.flops += int(operation.flops(*args, **kwargs, out_val=out))
        self._note_all(out, is_unknown=is_unknown)
        return out

    def _note_all(self, out: Any, *, is_unknown: bool) -> None:
        """Count the memory of an operation's results."""
        for leaf in (out,) if isinstance(out, Tensor) else tensors_in((out,)):
            if not leaf.is_meta and leaf.layout is torch.strided:
                self.note(leaf)
                if is_unknown:
                    self.mark_unknown(leaf)

    def note(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, if it is new."""
        self.note_storage(tensor.untyped_storage())

    def note_storage(self, storage: UntypedStorage) -> None:
        """Count a storage that is new, or has another size than before."""
        key = storage._cdata  # noqa: SLF001 - what identifies a storage without touching its memory
        size = storage.nbytes()
        known = self._storages.get(key)
        if known is not None:
            if known[1] != size:
                self._storages[key] = (known[0], size, known[2])
                self._change(size - known[1])
            return

        def forget(reference: weakref.ref[UntypedStorage]) -> None:
            del reference
            gone = self._storages.pop(key, None)
            self._unknown.discard(key)
            if gone is not None:
                self._change(-gone[1])

        self._storages[key] = (weakref.ref(storage, forget), size, self._phase)
        self._change(size)

    def mark_unknown(self, tensor: Tensor) -> None:
        """Note that a tensor's values were not computed."""
        self._unknown.add(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as in `note_storage`

    def is_unknown(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values, or those of others in its memory, were not computed."""
        if not self._unknown or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._unknown  # noqa: SLF001

    def _change(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.most_bytes = max(self.most_bytes, self.live_bytes)

    def _sort(self, boosted: Boosted) -> None:
        inner = boosted.optimizer.optim
        module = unwrap_model(boosted.model)
        parameters = [*module.parameters(), *boosted.optimizer.stepped()]
        seen: set[int] = set()
        with torch.no_grad():
            own = self._size([*parameters, *module.buffers()], seen)
            gradients = self._size((each.grad for each in parameters if each.grad is not None), seen)
            state = self._size((leaf for each in inner.state.values() for leaf in pytree.tree_leaves(each)), seen)
        # Sharded gradients may be out of sight: what backward made and is still there is nothing else.
        gradients += sum(
            size for key, (_, size, made) in self._storages.items() if made == "backward" and key not in seen
        )
        self.state = StateBytes(own, gradients, state, self.live_bytes - own - gradients - state)

    def _size(self, values: Iterable[Any], seen: set[int]) -> int:
        """Return the size of storages that are counted and not seen yet."""
        total = 0
        for value in values:
            if not isinstance(value, Tensor) or is_absent(value):
                continue
            try:
                storage = local_of(value).untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue  # a stand-in without memory
            key = storage._cdata  # noqa: SLF001 - what identifies a storage
            if key not in seen and storage.device.type != "meta":
                seen.add(key)
                known = self._storages.get(key)  # none of one that was there before
                total += 0 if known is None else known[1]
        return total


@contextlib.contextmanager
def recorded(*, computes: bool, is_alone: bool = False) -> Iterator[StepRecorder]:
    """Count what this thread holds, sends and computes inside.

    Args:
        computes: As for `StepRecorder`.
        is_alone: As for `StepRecorder`.
    """
    recorder = StepRecorder(computes=computes, is_alone=is_alone)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        found: torch.UntypedStorage = resize(storage, size)
        if threading.get_ident() == recorder.thread and storage.device.type != "meta":
            recorder.note_storage(storage)
        return found

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment] # not dispatched
    try:
        with observed_by(recorder), recorder:
            yield recorder
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
