"""A backend by which several ranks share one device, as asynchronous and as ordered as NCCL that connects eagerly.

NCCL refuses two ranks on one device, and gloo takes device memory for few calls and none from rank to rank. This
one copies to pinned memory on a stream of its own, lets gloo send it on a thread, and copies back:

- All work of a group, messages from rank to rank included, runs on one stream, in the order in which it was started.
  What waits for a rank that has not sent yet holds up all that the group starts after it.
- ``Work.wait`` lets the current stream wait, not the host: on CUDA the group's stream waits for a word of pinned
  memory, which the thread writes. Where streams can't do that, the host waits.
- Sums are computed in the dtype that is sent, rounded after each addition, in the order of ranks.
- An error of the thread lets the stream go on, with unknown values, and is raised by the next wait or call.

A group written in Python stands for all devices of a process group, so this one passes tensors of the CPU on to gloo:
``cpu:gloo,cuda:staged``. `register` must be called before the group is opened, and before CUDA is initialized.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor

NAME = "staged"
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_POLL_SECONDS = 1e-4
_SLAB_BYTES = 1 << 26
_kept: list[Tensor] = []  # what streams may use until the process ends


def register(device: str = "cuda") -> None:
    """Make the backend known to torch, for a device type; later calls do nothing."""
    if NAME.upper() in dist.Backend._plugins:
        return
    # A stream that waits for a word holds up the streams that share its hardware queue; there are 8 by default.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
        return StagedGroup(store, rank, size, timeout, device)

    dist.Backend.register_backend(NAME, make, devices=[device])
    plain = c10d.batch_isend_irecv

    # torch starts the messages of a batch together if the group is no subclass, and one after the other if it is.
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
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


class Gate:
    """What a CUDA stream waits for until the host opens it, by ``cuStreamWaitValue32``."""

    def __init__(self) -> None:
        self._wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        self._wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        _kept.append(word)
        self._address = word.data_ptr()
        self._word = ctypes.c_int32.from_address(self._address)

    def hold(self, stream: Any, number: int) -> None:
        """Let a stream wait until the gate has been opened for ``number``."""
        status = self._wait(stream.cuda_stream, self._address, number, _AT_LEAST)
        if status:
            msg = f"staged: cuStreamWaitValue32 failed with CUDA error {status}"
            raise RuntimeError(msg)

    def open(self, number: int) -> None:
        """Let the stream go on that waits for ``number``, or for less."""
        self._word.value = number


class Rooms:
    """Pinned memory that is lent and taken back; on CUDA outside of torch's allocator, whose figures cases measure.

    Small blocks are cut from one that is pinned at the start: a driver that waits for the device before it pins memory
    would wait for other ranks.
    """

    def __init__(self, device: str) -> None:
        self._is_registered = device == "cuda"
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._slab = self._pinned(_SLAB_BYTES if self._is_registered else 0)

    def take(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for a tensor's values, and the block that it is a part of.

        Raises:
            RuntimeError: If memory can't be pinned.
        """
        num_bytes = flat.numel() * flat.element_size()
        size = max(1 << (num_bytes - 1).bit_length() if num_bytes else 0, 4096)
        with self._lock:
            free = self._free.setdefault(size, [])
            block = free.pop() if free else self._cut(size)
        return block[:num_bytes].view(flat.dtype), block

    def give_back(self, blocks: Sequence[Tensor]) -> None:
        """Lend blocks to others from now on."""
        with self._lock:
            for block in blocks:
                self._free[block.numel()].append(block)

    def _cut(self, size: int) -> Tensor:
        if size > min(self._slab.numel(), _SLAB_BYTES // 64):
            return self._pinned(size)
        block, self._slab = self._slab[:size], self._slab[size:]
        return block

    def _pinned(self, size: int) -> Tensor:
        if not self._is_registered:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
        status = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0)
        if int(status):
            msg = f"staged: {size} bytes could not be pinned, CUDA error {int(status)}"
            raise RuntimeError(msg)
        _kept.append(block)
        return block


_Parting = Callable[[list["Tensor"], int], dict[int, "Tensor"]]
"""Returns what goes to each rank, or comes from it, of tensors on the host and for a number of ranks."""


def _to_all(tensors: list[Tensor], size: int) -> dict[int, Tensor]:
    return dict.fromkeys(range(size), tensors[0])


def _each(tensors: list[Tensor], _: int) -> dict[int, Tensor]:
    return dict(enumerate(tensors))


def _equal_parts(tensors: list[Tensor], size: int) -> dict[int, Tensor]:
    return dict(enumerate(tensors[0].split([tensors[0].numel() // size] * size)))


def _with(peer: int) -> _Parting:
    return lambda tensors, _: {peer: tensors[0]}


@dataclass(eq=False)
class _Part:
    """What is read from the device, what is sent, and what is written to it.

    Attributes:
        name: For errors.
        reads: Flat tensors that are copied to the host.
        writes: Flat tensors that are copied back.
        tag: What the messages carry.
        sent: Parts what was read.
        received: Parts what will be written.
        op: By which what comes from all ranks is reduced, in place of ``received``.
    """

    name: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    tag: int
    sent: _Parting | None
    received: _Parting | None
    op: Any
    read: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class _Operation:
    parts: list[_Part]
    outputs: list[Tensor]
    number: int
    begun: Any
    arrived: Any
    finished: Any
    future: Future[list[Tensor]] | None = None
    blocks: list[Tensor] = field(default_factory=list)
    is_done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    @property
    def name(self) -> str:
        return ", ".join(part.name for part in self.parts) or "an empty batch"

    def release(self) -> None:
        """Drop the device's tensors: a stream that may free them waits for this operation."""
        if self.future is None:
            self.outputs = []
        for part in self.parts:
            part.reads = part.writes = ()


class StagedWork(dist.Work):
    """What a call returns."""

    def __init__(self, group: StagedGroup, operation: _Operation, *, blocks_host: bool) -> None:
        super().__init__()
        self._group, self._operation, self._blocks_host = group, operation, blocks_host

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait; with a time limit, or after a barrier, the host too.

        Raises:
            RuntimeError: If the operation, or one before it, has failed.
        """
        operation = self._operation
        if timeout:
            if not operation.is_done.wait(timeout.total_seconds()):
                msg = f"staged: {operation.name} was not done within {timeout.total_seconds():g} s"
                raise RuntimeError(msg)
        elif self._group.gate is None:
            operation.is_done.wait()
        if self._group.gate is None or operation.is_done.is_set():
            self._group.check(operation)
        self._group.module.current_stream(self._group.device).wait_event(operation.finished)
        if timeout or self._blocks_host:
            operation.finished.synchronize()
            self._group.check(operation)
        operation.release()
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Whether the results are on the device, or never will be."""
        return self._operation.is_done.is_set() and (
            self._operation.error is not None or self._operation.finished.query()
        )

    def result(self) -> list[Tensor]:
        """Return the tensors that are written; the current stream must have waited."""
        return self._operation.outputs

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors that are written: who waits for it lets streams wait, as `wait`."""
        return self._group.future_of(self._operation)


class _DeviceBackend:
    """What ``ProcessGroup._get_backend`` returns for the device."""

    supports_splitting = False
    supports_coalescing = True

    def __init__(self, group: StagedGroup, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self._timeout = timeout

    @property
    def options(self) -> _DeviceBackend:
        return self

    def name(self) -> str:
        return NAME


def _by_gloo(name: str) -> Callable[..., Any]:
    """Return a method that gloo's of another name does, for tensors of the CPU."""

    def call(self: StagedGroup, *arguments: Any) -> Any:
        return getattr(self.cpu, name)(*(each for each in arguments if each is not None))

    return call


_OF_GLOO = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
_OF_GLOO["all_to_all_single"] = "alltoall_base"
"""Names of methods that torch's gloo has under the names before torch 2.12."""


def _or_gloo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let gloo do what a method is called to with tensors of the CPU."""
    on_cpu = _by_gloo(_OF_GLOO.get(method.__name__, method.__name__))

    @wraps(method)
    def call(self: StagedGroup, first: Any, *arguments: Any) -> Any:
        tensor = first
        while not isinstance(tensor, torch.Tensor):
            tensor = tensor[0]
        return (on_cpu if tensor.device.type == "cpu" else method)(self, first, *arguments)

    return call


def _own_stream(device: torch.device) -> Any:
    """Return a stream that nobody else gets: torch hands out 32 in turn, and one that waits would hold up its twin."""
    if device.type != "cuda":
        return torch.get_device_module(device).Stream(device)
    made = ctypes.c_void_p()
    status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(made), 1)  # CU_STREAM_NON_BLOCKING
    if status:
        msg = f"staged: cuStreamCreate failed with CUDA error {status}"
        raise RuntimeError(msg)
    return torch.cuda.ExternalStream(made.value, device)


class StagedGroup(dist.ProcessGroup):
    """A process group of ranks that may share a device.

    Args:
        store: Where the ranks meet.
        rank: Of this process, in the group.
        size: Number of ranks.
        timeout: How long a message may take.
        device: Device type.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, device: str) -> None:
        super().__init__(rank, size)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.cpu = dist.ProcessGroupGloo(dist.PrefixStore("host/", store), rank, size, timeout=timeout)
        self.cpu._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.cpu)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("staged/", store), rank, size, timeout=timeout)
        self._rank, self._size, self._seconds = rank, size, timeout.total_seconds()
        self.module: Any = torch.get_device_module(device)
        self.device = torch.device(device, self.module.current_device())
        self._of_device = _DeviceBackend(self, timeout)
        # torch makes the streams that it hands out when somebody first asks, and no stream can be made while one waits.
        self._handed_out = [self.module.Stream(self.device, priority=priority) for priority in (0, -1)]
        self.gate = _make_gate(device)
        self._rooms = _rooms(device)
        self._lock = threading.RLock()
        self._num_started = 0
        self._num_started_of: dict[str, int] = {}
        self._batch: list[_Part] | None = None
        self._pending: list[_Operation] = []
        self._error: Exception | None = None
        self._is_told = False
        self._waiting: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"staged {rank}", daemon=True)
        self._thread.start()

    @cached_property
    def _stream(self) -> Any:
        """The stream of the group's work: made at first use, as few groups have any, and queues of a device are few."""
        return _own_stream(self.device)

    @cached_property
    def _side(self) -> Any:
        """The stream where futures are set, whatever the group has started since."""
        return _own_stream(self.device)

    # ---- what torch asks a group

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return super()._get_backend(device) if torch.device(device).type == "cpu" else self._of_device

    def shutdown(self) -> None:
        """End the thread, after what was started.

        Raises:
            RuntimeError: If an operation failed that nobody has waited for.
        """
        self._waiting.put(None)
        self._thread.join(timeout=5.0)
        if self._error is not None and not self._is_told:
            self.check()

    def abort(self) -> None:
        """End the thread; messages that wait for others fail by their time limit."""
        self._waiting.put(None)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        parts, self._batch = self._batch or [], None
        return self._enqueue(parts)

    # ---- collectives

    @_or_gloo
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Send the root's tensor to all."""
        tensor, root = self._one(tensors), opts.rootRank
        if self._rank == root:
            return self._collect(f"broadcast from {root}", [tensor], [], sent=_to_all)
        return self._collect(f"broadcast from {root}", [], [tensor], received=_with(root))

    @_or_gloo
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce in place, on all ranks."""
        tensor = self._one(tensors)
        return self._collect("all_reduce", [tensor], [tensor], sent=_to_all, op=_op_of(opts))

    @_or_gloo
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce into the root's tensor."""
        tensor, root = self._one(tensors), opts.rootRank
        if self._rank == root:
            return self._collect(f"reduce to {root}", [tensor], [tensor], sent=_with(root), op=_op_of(opts))
        return self._collect(f"reduce to {root}", [tensor], [], sent=_with(root))

    @_or_gloo
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather a tensor of each rank, which may differ in size."""
        del opts
        parts = [self._flat(output) for output in outputs[0]]
        return self._collect("all_gather", [self._one(inputs)], parts, sent=_to_all, received=_each)

    @_or_gloo
    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        """Gather equal parts into one tensor."""
        del opts
        return self._collect("all_gather", [self._flat(own)], [self._flat(output)], sent=_to_all, received=_equal_parts)

    @_or_gloo
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Reduce a list of tensors, which may differ in size, and keep this rank's."""
        parts = [self._flat(part) for part in inputs[0]]
        return self._collect("reduce_scatter", parts, [self._one(outputs)], sent=_each, op=_op_of(opts))

    @_or_gloo
    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        """Reduce a tensor and keep this rank's equal part."""
        reads, writes = [self._flat(whole)], [self._flat(output)]
        return self._collect("reduce_scatter", reads, writes, sent=_equal_parts, op=_op_of(opts))

    @_or_gloo
    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Send rows of a tensor to each rank."""
        del opts
        sent, received = self._rows(own, input_splits), self._rows(output, output_splits)
        return self._collect("all_to_all", [self._flat(own)], [self._flat(output)], sent=sent, received=received)

    @_or_gloo
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send a tensor to each rank."""
        del opts
        reads, writes = ([self._flat(each) for each in tensors] for tensors in (inputs, outputs))
        return self._collect("all_to_all", reads, writes, sent=_each, received=_each)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce several tensors in place."""
        return _last(self.allreduce([tensor], opts) for tensor in tensors)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather equal parts into one tensor each."""
        return _last(self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True))

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors and keep this rank's equal part of each."""
        return _last(self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True))

    @_or_gloo
    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Send a tensor; the order of messages decides which one is received, as with NCCL, and not the tag."""
        del tag
        return self._collect(f"message {self._rank} to {peer}", [self._one(tensors)], [], sent=_with(peer))

    @_or_gloo
    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Receive a tensor."""
        del tag
        return self._collect(f"message {peer} to {self._rank}", [], [self._one(tensors)], received=_with(peer))

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; the host too."""
        opts = dist.BarrierOptions() if opts is None else opts
        if opts.device is None or opts.device.type == "cpu":
            return self.cpu.barrier(opts)
        none = [torch.zeros(1, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._collect("barrier", none[:1], none[1:], sent=_to_all, op=dist.ReduceOp.SUM, blocks_host=True)

    gather, scatter, recv_anysource = _by_gloo("gather"), _by_gloo("scatter"), _by_gloo("recv_anysource")
    # The names before torch 2.12, by which torch calls overrides as well.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- starting, by the caller

    def _one(self, tensors: list[Tensor]) -> Tensor:
        if len(tensors) != 1:
            msg = f"staged takes one tensor per call; got {len(tensors)}"
            raise ValueError(msg)
        return self._flat(tensors[0])

    def _flat(self, tensor: Tensor) -> Tensor:
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

    def _rows(self, tensor: Tensor, splits: list[int]) -> _Parting:
        """Part a tensor by rows, alike where nothing else is said."""
        rows = tensor.shape[0] if tensor.dim() else 1
        row = tensor.numel() // rows if rows else 0
        sizes = [split * row for split in splits or [rows // self._size] * self._size]
        return lambda tensors, _: dict(enumerate(tensors[0].split(sizes)))

    def _collect(
        self,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        *,
        sent: _Parting | None = None,
        received: _Parting | None = None,
        op: Any = None,
        blocks_host: bool = False,
    ) -> Any:
        """Start what a `_Part` says, or add it to the batch; ranks that call other things wait for each other."""
        kind = name if name.startswith("message") else "collective"
        number = self._num_started_of[kind] = self._num_started_of.get(kind, 0) + 1
        tag = zlib.crc32(f"{name} {_kind(op)} {number}".encode()) & 0x3FFFFFFF
        part = _Part(name, reads, writes, tag, sent, received, op)
        if self._batch is not None:
            self._batch.append(part)
            return None
        return self._enqueue([part], blocks_host=blocks_host)

    def _enqueue(self, parts: list[_Part], *, blocks_host: bool = False) -> StagedWork:
        self.check()
        with self._lock, _plainly():
            self._take_back()
            self._num_started += 1
            events = [self.module.Event() for _ in range(3)]
            outputs = [tensor for part in parts for tensor in part.writes]
            operation = _Operation(parts, outputs, self._num_started, *events)
            if self.gate is None:
                operation.future = Future(devices=[self.device])
            operation.begun.record(self.module.current_stream(self.device))
            for part in parts:
                part.read = [self._room(flat, operation) for flat in part.reads]
                part.written = [self._room(flat, operation) for flat in part.writes]
            if self.gate is not None:
                self._copy_in(operation)
                self.gate.hold(self._stream, operation.number)
                self._copy_out(operation)
            self._pending.append(operation)
            self._waiting.put(operation)
        return StagedWork(self, operation, blocks_host=blocks_host)

    def _room(self, flat: Tensor, operation: _Operation) -> Tensor:
        room, block = self._rooms.take(flat)
        operation.blocks.append(block)
        return room

    def _take_back(self) -> None:
        """Let go of operations that have ended, and lend their memory on the host again."""
        pending = []
        for each in self._pending:
            if each.error is None and each.is_done.is_set() and each.finished.query():
                self._rooms.give_back(each.blocks)
            else:
                pending.append(each)
        self._pending = pending

    def _copy_in(self, operation: _Operation) -> None:
        self._stream.wait_event(operation.begun)
        with self.module.stream(self._stream):
            for part in operation.parts:
                for host, flat in zip(part.read, part.reads, strict=True):
                    _copy(flat, host)
        operation.arrived.record(self._stream)

    def _copy_out(self, operation: _Operation) -> None:
        with self.module.stream(self._stream):
            for part in operation.parts:
                for host, flat in zip(part.written, part.writes, strict=True):
                    _copy(host, flat)
            operation.finished.record(self._stream)
            if operation.future is not None:
                operation.future.set_result(operation.outputs)

    def future_of(self, operation: _Operation) -> Future[list[Tensor]]:
        """Return an operation's future; where streams wait at a gate it is done at once, as NCCL's."""
        with self._lock:
            if operation.future is None:
                operation.future = Future(devices=[self.device])
                with self.module.stream(self._side):
                    self._side.wait_event(operation.finished)
                    operation.future.set_result(operation.outputs)
            return operation.future

    # ---- the thread

    def _serve(self) -> None:
        while (operation := self._waiting.get()) is not None:
            with torch.no_grad():
                self._run(operation)
            operation.is_done.set()
            if self.gate is not None:
                self.gate.open(operation.number)
            del operation

    def _run(self, operation: _Operation) -> None:
        try:
            if self._error is not None:
                raise self._error
            if self.gate is None:
                self._copy_in(operation)
            self._send(operation)
            if self.gate is None:
                self._copy_out(operation)
        except Exception as error:  # noqa: BLE001 - raised by the next wait or call
            operation.error = error
            if self.gate is None and operation.future is not None:
                operation.future.set_exception(error)
            if self._error is None:
                msg = f"staged: {operation.name} failed on rank {self._rank} of the group: {error}"
                self._error = RuntimeError(msg)
                self._error.__cause__ = error

    def _send(self, operation: _Operation) -> None:
        self._wait_for_inputs(operation)
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

    def _wait_for_inputs(self, operation: _Operation) -> None:
        if self.gate is None:
            operation.arrived.synchronize()
            return
        end = time.monotonic() + self._seconds
        while not operation.arrived.query():
            if time.monotonic() > end:
                msg = f"the device had not come to its inputs after {self._seconds:g} s"
                raise RuntimeError(msg)
            time.sleep(_POLL_SECONDS)

    def check(self, operation: _Operation | None = None) -> None:
        """Raise the error of an operation, or of any.

        Raises:
            RuntimeError: If one failed.
        """
        if self._error is not None and (operation is None or operation.error is not None):
            self._is_told = True
            raise RuntimeError(str(self._error)) from self._error.__cause__


def _make_gate(device: str) -> Gate | None:
    if device != "cuda":
        return None
    try:
        return Gate()
    except (AttributeError, OSError) as error:
        print(f"staged: the host waits in place of streams, as cuStreamWaitValue32 is missing: {error}", flush=True)
        return None


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Keep what is computed here from autograd, and from the caller's modes."""
    with torch.inference_mode(mode=False), torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _copy(source: Tensor, target: Tensor) -> None:
    with torch.inference_mode(target.is_inference()):
        target.copy_(source, non_blocking=True)


@cache
def _rooms(device: str) -> Rooms:
    return Rooms(device)


def _last(works: Iterator[Any]) -> Any:
    started = list(works)
    for work in started[:-1]:
        work.wait()
    return started[-1]


def _kind(op: Any) -> Any:
    return getattr(op, "op", op)


def _op_of(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _reduced(terms: Mapping[int, Tensor], op: Any) -> Tensor:
    """Reduce in the order of ranks, rounding after each addition, so that all ranks get the same bits."""
    kind, size = _kind(op), len(terms)
    is_mean = kind == dist.ReduceOp.AVG
    is_float = terms[0].is_floating_point()
    factor = 1 / size if is_mean and is_float else op.__getstate__()[1] if kind == dist.ReduceOp.PREMUL_SUM else None
    total, *rest = (terms[rank] if factor is None else terms[rank] * factor for rank in range(size))
    for term in rest:
        total = _combined(total, term, kind)
    return torch.div(total, size, rounding_mode="trunc") if is_mean and not is_float else total


def _combined(one: Tensor, other: Tensor, kind: Any) -> Tensor:
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
