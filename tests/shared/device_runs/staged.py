"""A backend by which several ranks share one device: asynchronous, and ordered as NCCL that connects eagerly.

NCCL refuses two ranks on one device, and gloo takes device memory for few calls and none from rank to rank. This
one copies to pinned memory on a stream of its own, lets gloo send it on a thread, and copies back:

- All work of a group, messages from rank to rank included, is done by one thread, in the order in which it was started.
  What waits for a rank that has not sent yet holds up all that the group starts after it.
- ``Work.wait`` lets the host wait: what a stream does too early, NCCL and the simulated accelerator show.
- Sums are computed in the dtype that is sent, rounded after each addition, in the order of ranks.
- An error of the thread is raised by the next wait or call.

A group written in Python stands for all devices of a process group, so this one passes tensors of the CPU on to gloo:
``cpu:gloo,cuda:staged``. `register` must be called before the group is opened.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import zlib
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

NAME = "staged"


def register(device="cuda"):
    """Make the backend known to torch, for a device type; later calls do nothing."""
    if NAME.upper() in dist.Backend._plugins:
        return

    def make(store, rank, size, timeout):
        return StagedGroup(store, rank, size, timeout, device)

    dist.Backend.register_backend(NAME, make, devices=[device])
    plain = c10d.batch_isend_irecv

    # torch starts the messages of a batch together if the group is no subclass, and one after the other if it is.
    def batch_isend_irecv(p2p_op_list):
        first = p2p_op_list[0]
        group = first.group or c10d._get_default_group()
        if not isinstance(group, StagedGroup) or first.tensor.device.type == "cpu":
            return plain(p2p_op_list)
        group._start_coalescing(first.tensor.device)
        try:
            plain(p2p_op_list)
        finally:
            work = group._end_coalescing(first.tensor.device)
        return [work]

    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv


def _to_all(tensors, size):
    return dict.fromkeys(range(size), tensors[0])


def _each(tensors, _):
    return dict(enumerate(tensors))


def _equal_parts(tensors, size):
    return dict(enumerate(tensors[0].split([tensors[0].numel() // size] * size)))


def _with(peer):
    return lambda tensors, _: {peer: tensors[0]}


@dataclass(eq=False)
class _Part:
    """What is read from the device, what is sent, and what is written to it.

    Attributes:
        name: For errors.
        reads: Flat tensors that are copied to the host.
        writes: Flat tensors that are copied back.
        tag: What the messages carry.
        sent: Returns what goes to each rank, of what was read and for a number of ranks.
        received: Returns what comes from each, of what will be written.
        op: By which what comes from all ranks is reduced, in place of ``received``.
    """

    name: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    tag: int
    sent: Callable[[list[Tensor], int], dict[int, Tensor]] | None
    received: Callable[[list[Tensor], int], dict[int, Tensor]] | None
    op: Any
    read: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class _Operation:
    parts: list[_Part]
    begun: Any
    future: Future[list[Tensor]]
    is_done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    @property
    def name(self):
        return ", ".join(part.name for part in self.parts) or "an empty batch"


class StagedWork(dist.Work):
    """What a call returns."""

    def __init__(self, group, operation):
        super().__init__()
        self._group, self._operation = group, operation

    def wait(self, timeout=None):
        """Let the host wait until the results are on the device.

        Raises:
            RuntimeError: If the operation, or one before it, has failed, or is late.
        """
        if not self._operation.is_done.wait(timeout.total_seconds() if timeout else None):
            msg = f"staged: {self._operation.name} was not done within {timeout.total_seconds():g} s"
            raise RuntimeError(msg)
        self._group.check(self._operation)
        return True

    synchronize = block_current_stream = wait

    def is_completed(self):
        """Whether the results are on the device, or never will be."""
        return self._operation.is_done.is_set()

    def result(self):
        """Return the tensors that are written."""
        return [tensor for part in self._operation.parts for tensor in part.writes]

    def get_future(self):
        """Return a future of the tensors that are written."""
        return self._operation.future


class _DeviceBackend:
    """What ``ProcessGroup._get_backend`` returns for the device."""

    supports_splitting = False
    supports_coalescing = True

    def __init__(self, group, timeout):
        self.rank, self.size = group.rank, group.size
        self._timeout = timeout

    @property
    def options(self):
        return self

    def name(self):
        return NAME


def _by_gloo(name):
    """Return a method that gloo's of another name does, for tensors of the CPU."""

    def call(self, *arguments):
        return getattr(self.cpu, name)(*(each for each in arguments if each is not None))

    return call


_OF_GLOO = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
_OF_GLOO["all_to_all_single"] = "alltoall_base"
"""Names of methods that torch's gloo has under the names before torch 2.12."""


def _or_gloo(method):
    """Let gloo do what a method is called to with tensors of the CPU."""
    on_cpu = _by_gloo(_OF_GLOO.get(method.__name__, method.__name__))

    @wraps(method)
    def call(self, first, *arguments):
        tensor = first
        while not isinstance(tensor, torch.Tensor):
            tensor = tensor[0]
        return (on_cpu if tensor.device.type == "cpu" else method)(self, first, *arguments)

    return call


class StagedGroup(dist.ProcessGroup):
    """A process group of ranks that may share a device.

    Args:
        store: Where the ranks meet.
        rank: Of this process, in the group.
        size: Number of ranks.
        timeout: How long a message may take.
        device: Device type.
    """

    def __init__(self, store, rank, size, timeout, device):
        super().__init__(rank, size)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.cpu = dist.ProcessGroupGloo(dist.PrefixStore("host/", store), rank, size, timeout=timeout)
        self.cpu._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.cpu)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("staged/", store), rank, size, timeout=timeout)
        self._rank, self._size = rank, size
        self.module = torch.get_device_module(device)
        self.device = torch.device(device, self.module.current_device())
        self._of_device = _DeviceBackend(self, timeout)
        self._num_started_of = {}
        self._batch = None
        self._error = None
        self._is_told = False
        self._waiting = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"staged {rank}", daemon=True)
        self._thread.start()

    @cached_property
    def _stream(self):
        """The stream of the group's copies: made at first use, as few groups have any."""
        return self.module.Stream(self.device)

    # ---- what torch asks a group

    def getBackendName(self):  # noqa: N802 - torch's name
        """Return the backend's name."""
        return NAME

    def _get_backend(self, device):
        return super()._get_backend(device) if torch.device(device).type == "cpu" else self._of_device

    def shutdown(self):
        """End the thread, after what was started.

        Raises:
            RuntimeError: If an operation failed that nobody has waited for.
        """
        self._waiting.put(None)
        self._thread.join(timeout=5.0)
        if self._error is not None and not self._is_told:
            self.check()

    def abort(self):
        """End the thread; messages that wait for others fail by their time limit."""
        self._waiting.put(None)

    def _start_coalescing(self, device):
        if device.type != "cpu":
            self._batch = []

    def _end_coalescing(self, device):
        if device.type == "cpu":
            return None
        parts, self._batch = self._batch or [], None
        return self._enqueue(parts)

    # ---- collectives

    @_or_gloo
    def broadcast(self, tensors, opts):
        """Send the root's tensor to all."""
        tensor, root = self._one(tensors), opts.rootRank
        if self._rank == root:
            return self._collect(f"broadcast from {root}", [tensor], [], sent=_to_all)
        return self._collect(f"broadcast from {root}", [], [tensor], received=_with(root))

    @_or_gloo
    def allreduce(self, tensors, opts=None):
        """Reduce in place, on all ranks."""
        tensor = self._one(tensors)
        return self._collect("all_reduce", [tensor], [tensor], sent=_to_all, op=_op_of(opts))

    @_or_gloo
    def reduce(self, tensors, opts):
        """Reduce into the root's tensor."""
        tensor, root = self._one(tensors), opts.rootRank
        if self._rank == root:
            return self._collect(f"reduce to {root}", [tensor], [tensor], sent=_with(root), op=_op_of(opts))
        return self._collect(f"reduce to {root}", [tensor], [], sent=_with(root))

    @_or_gloo
    def allgather(self, outputs, inputs, opts=None):
        """Gather a tensor of each rank, which may differ in size."""
        del opts
        parts = [self._flat(output) for output in outputs[0]]
        return self._collect("all_gather", [self._one(inputs)], parts, sent=_to_all, received=_each)

    @_or_gloo
    def all_gather_single(self, output, own, opts=None):
        """Gather equal parts into one tensor."""
        del opts
        return self._collect("all_gather", [self._flat(own)], [self._flat(output)], sent=_to_all, received=_equal_parts)

    @_or_gloo
    def reduce_scatter(self, outputs, inputs, opts=None):
        """Reduce a list of tensors, which may differ in size, and keep this rank's."""
        parts = [self._flat(part) for part in inputs[0]]
        return self._collect("reduce_scatter", parts, [self._one(outputs)], sent=_each, op=_op_of(opts))

    @_or_gloo
    def reduce_scatter_single(self, output, whole, opts=None):
        """Reduce a tensor and keep this rank's equal part."""
        reads, writes = [self._flat(whole)], [self._flat(output)]
        return self._collect("reduce_scatter", reads, writes, sent=_equal_parts, op=_op_of(opts))

    @_or_gloo
    def all_to_all_single(self, output, own, output_splits, input_splits, opts=None):
        """Send rows of a tensor to each rank."""
        del opts
        sent, received = self._rows(own, input_splits), self._rows(output, output_splits)
        return self._collect("all_to_all", [self._flat(own)], [self._flat(output)], sent=sent, received=received)

    @_or_gloo
    def alltoall(self, outputs, inputs, opts=None):
        """Send a tensor to each rank."""
        del opts
        reads, writes = ([self._flat(each) for each in tensors] for tensors in (inputs, outputs))
        return self._collect("all_to_all", reads, writes, sent=_each, received=_each)

    def allreduce_coalesced(self, tensors, opts):
        """Reduce several tensors in place."""
        return _last(self.allreduce([tensor], opts) for tensor in tensors)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        """Gather equal parts into one tensor each."""
        return _last(self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        """Reduce several tensors and keep this rank's equal part of each."""
        return _last(self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True))

    @_or_gloo
    def send(self, tensors, peer, tag):
        """Send a tensor; the order of messages decides which one is received, as with NCCL, and not the tag."""
        del tag
        return self._collect(f"message {self._rank} to {peer}", [self._one(tensors)], [], sent=_with(peer))

    @_or_gloo
    def recv(self, tensors, peer, tag):
        """Receive a tensor."""
        del tag
        return self._collect(f"message {peer} to {self._rank}", [], [self._one(tensors)], received=_with(peer))

    def barrier(self, opts=None):
        """Wait for all ranks; the host too."""
        opts = dist.BarrierOptions() if opts is None else opts
        if opts.device is None or opts.device.type == "cpu":
            return self.cpu.barrier(opts)
        none = [torch.zeros(1, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._collect("barrier", none[:1], none[1:], sent=_to_all, op=dist.ReduceOp.SUM)

    gather, scatter, recv_anysource = _by_gloo("gather"), _by_gloo("scatter"), _by_gloo("recv_anysource")
    # The names before torch 2.12, by which torch calls overrides as well.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- starting, by the caller

    def _one(self, tensors):
        if len(tensors) != 1:
            msg = f"staged takes one tensor per call; got {len(tensors)}"
            raise ValueError(msg)
        return self._flat(tensors[0])

    def _flat(self, tensor):
        """Return a tensor's memory as a flat tensor with a version counter of its own, as NCCL leaves them alone."""
        if tensor.device.type != self.device.type:
            msg = f"staged takes tensors of {self.device.type}, or all of the CPU; got one of {tensor.device}"
            raise ValueError(msg)
        formats = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.dim(), [])
        if not any(tensor.is_contiguous(memory_format=each) for each in [torch.contiguous_format, *formats]):
            msg = f"staged takes contiguous tensors; got strides {tensor.stride()} of shape {tuple(tensor.shape)}"
            raise ValueError(msg)
        with _plainly():
            return tensor.data.as_strided((tensor.numel(),), (1,))

    def _rows(self, tensor, splits):
        """Part a tensor by rows, alike where nothing else is said."""
        rows = tensor.shape[0] if tensor.dim() else 1
        row = tensor.numel() // rows if rows else 0
        sizes = [split * row for split in splits or [rows // self._size] * self._size]
        return lambda tensors, _: dict(enumerate(tensors[0].split(sizes)))

    def _collect(self, name, reads, writes, *, sent=None, received=None, op=None):
        """Start what a `_Part` says, or add it to the batch; ranks that call other things wait for each other."""
        kind = name if name.startswith("message") else "collective"
        number = self._num_started_of[kind] = self._num_started_of.get(kind, 0) + 1
        tag = zlib.crc32(f"{name} {_kind(op)} {number}".encode()) & 0x3FFFFFFF
        part = _Part(name, reads, writes, tag, sent, received, op)
        if self._batch is not None:
            self._batch.append(part)
            return None
        return self._enqueue([part])

    def _enqueue(self, parts):
        self.check()
        with _plainly():
            operation = _Operation(parts, self.module.Event(), Future(devices=[self.device]))
            operation.begun.record(self.module.current_stream(self.device))
            self._waiting.put(operation)
        return StagedWork(self, operation)

    # ---- the thread

    def _serve(self):
        while (operation := self._waiting.get()) is not None:
            with torch.no_grad():
                self._run(operation)
            operation.is_done.set()
            del operation

    def _run(self, operation):
        try:
            if self._error is not None:
                raise self._error
            with self.module.stream(self._stream):
                self._stream.wait_event(operation.begun)
                for part in operation.parts:
                    part.read, part.written = ([*map(_room_of, flats)] for flats in (part.reads, part.writes))
                    _copy(part.reads, part.read)
                self._stream.synchronize()
                self._send(operation)
                for part in operation.parts:
                    _copy(part.written, part.writes)
                self._stream.synchronize()
                operation.future.set_result([tensor for part in operation.parts for tensor in part.writes])
        except Exception as error:  # noqa: BLE001 - raised by the next wait or call
            operation.error = error
            operation.future.set_exception(error)
            if self._error is None:
                msg = f"staged: {operation.name} failed on rank {self._rank} of the group: {error}"
                self._error = RuntimeError(msg)
                self._error.__cause__ = error

    def _send(self, operation):
        messages, terms = [], []
        for part in operation.parts:
            sent = {} if part.sent is None else part.sent(part.read, self._size)
            received = {} if part.received is None else part.received(part.written, self._size)
            if part.op is not None:
                received = {peer: torch.empty_like(part.written[0]) for peer in range(self._size)}
            if self._rank in sent and self._rank in received:
                received[self._rank].copy_(sent[self._rank])
            for call, tensors in ((self._gloo.send, sent), (self._gloo.recv, received)):
                messages += [
                    call([tensor.view(torch.uint8)], peer, part.tag)
                    for peer, tensor in tensors.items()
                    if peer != self._rank and tensor.numel()
                ]
            terms.append(received)
        for message in messages:
            message.wait()
        for part, received in zip(operation.parts, terms, strict=True):
            if part.op is not None:
                part.written[0].copy_(_reduced(received, part.op))

    def check(self, operation=None):
        """Raise the error of an operation, or of any.

        Raises:
            RuntimeError: If one failed.
        """
        if self._error is not None and (operation is None or operation.error is not None):
            self._is_told = True
            raise RuntimeError(str(self._error)) from self._error.__cause__


@contextlib.contextmanager
def _plainly():
    """Keep what is computed here from autograd, and from the caller's modes."""
    with torch.inference_mode(mode=False), torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _room_of(flat):
    return torch.empty(flat.numel(), dtype=flat.dtype, device="cpu", pin_memory=True)


def _copy(sources, targets):
    for source, target in zip(sources, targets, strict=True):
        with torch.inference_mode(target.is_inference()):
            target.copy_(source, non_blocking=True)


def _last(works):
    started = list(works)
    for work in started[:-1]:
        work.wait()
    return started[-1]


def _kind(op):
    return getattr(op, "op", op)


def _op_of(opts):
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _reduced(terms, op):
    """Reduce in the order of ranks, rounding after each addition, so that all ranks get the same bits."""
    kind, size = _kind(op), len(terms)
    is_mean = kind == dist.ReduceOp.AVG
    is_float = terms[0].is_floating_point()
    factor = 1 / size if is_mean and is_float else op.__getstate__()[1] if kind == dist.ReduceOp.PREMUL_SUM else None
    total, *rest = (terms[rank] if factor is None else terms[rank] * factor for rank in range(size))
    for term in rest:
        total = _combined(total, term, kind)
    return torch.div(total, size, rounding_mode="trunc") if is_mean and not is_float else total


def _combined(one, other, kind):
    if kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM):
        return one | other if one.dtype == torch.bool else one + other
    if kind == dist.ReduceOp.PRODUCT:
        return one * other
    if kind == dist.ReduceOp.MIN:
        return torch.fmin(one, other)  # as NCCL's, a number wins over NaN
    if kind == dist.ReduceOp.MAX:
        return torch.fmax(one, other)
    msg = f"staged, as NCCL, has no reduction {kind}"
    raise ValueError(msg)
