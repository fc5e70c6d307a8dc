"""Sending activations and their gradients between the ranks of a pipeline, whatever their shapes.

Each message is a header that says which tensors follow, with their shapes, and the tensors. Messages between two ranks
arrive in the order in which they were sent, which both know from the schedule; so a rank asks for them in that order,
one ahead of what it needs, and nothing has to be labelled. Each direction between two ranks has a process group of its
own (`make_channels`): on devices a group works off its messages one by one, in the order in which they were started, so
that what a rank sends would wait for what it has asked for ahead, and ranks for each other in a circle.
Headers travel on the CPU where the groups have a backend for it, so that reading one does not stop the device.

Large tensors travel only when the receiver has given them room. So that they do while it computes, there is room for
them before their header has come, in the shapes of the message of that kind before, if that was like the one before it,
too. On the CPU they are asked for at once; the sender knows of that, and where it then has something else to send, it
fills what was asked for with anything, and sends the right tensors after it.

On devices a rank's host asks for tensors when their header has come, which leaves when the sender has started them. One
that is asked for before that occupies a stream until the sender has come so far, for which it may need what this rank's
host has still to start; and all streams can hold up a host: where memory is freed or pinned, where a kernel is loaded
at its first use, where a user synchronizes the device. Then both would wait for ever. As hosts are ahead of their
devices, tensors travel while the device computes what was started before all the same: in a stream of their own, which
waits only for what had been started when there was room for them.

A rank that has failed sends headers that say so in place of what it owes, so that nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.state import byte_view
from booster_runtime.collectives import WAITS, new_groups
from booster_runtime.memory import CopyStream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

_MOST_DIMS = 8
_FIELDS = 4 + _MOST_DIMS
"""Header entries for each tensor: present, differentiable, dtype, number of dimensions, sizes."""
_MOST_HEADERS = 64
"""Headers that are kept for messages that look alike."""
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def check_sendable(tensor: Tensor, what: str) -> None:
    """Raise if a tensor can't be sent; where it is made, as a sender that raises keeps others waiting.

    Args:
        tensor: What is sent.
        what: What it is called in errors.

    Raises:
        ConfigError: If its format is none that is sent, or it has too many dimensions.
    """
    if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_DIMS:
        msg = (
            f"A stage can't send {what}: it is of {tensor.dtype} and has {tensor.dim()} dimensions. Use one of "
            f"{', '.join(map(str, _DTYPES))}, and at most {_MOST_DIMS} dimensions."
        )
        raise ConfigError(msg)


class SendHandle:
    """A message on its way; `P2PChannel.release` lets go of it.

    Args:
        parts: What to wait for, with the tensor that it reads.
    """

    def __init__(self, parts: Sequence[tuple[Any, Tensor]]) -> None:
        self._parts: deque[tuple[Any, Tensor]] = deque(parts)

    def finish(self) -> None:
        """Return once the message has left, and keep its tensors alive no longer."""
        while self._parts:
            work, _ = self._parts.popleft()
            with WAITS:
                work.wait()


Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""The formats and shapes of the tensors that follow a header; those without elements are not sent."""


class _ShapeHint:
    """What messages of each kind look like, as their sender and their receiver both know."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[Layout | None, Layout | None]] = {}

    def of(self, kind: Hashable) -> Layout:
        """Return what the next message of a kind is taken to be; nothing where that can't be told."""
        last, before = self._last.get(kind, (None, None))
        return last if last is not None and last == before else ()

    def note(self, kind: Hashable, layout: Layout) -> None:
        """Tell what a message was."""
        self._last[kind] = (layout, self._last.get(kind, (None, None))[0])


@dataclass
class _Expected:
    """A message that is expected: its header, if that was asked for, and room for the tensors that it is taken to have.

    Args:
        kind: As its sender gives it.
        layout: What follows its header, as far as that can be told.
        header: What it is waited for by, and where it comes.
        rooms: Memory for what follows.
        works: What that is waited for by, where it was asked for.
        is_free: Comes when a device uses the memory no longer.
    """

    kind: Hashable
    layout: Layout
    header: tuple[Any, Tensor] | None
    rooms: list[Tensor]
    works: list[Any] = field(default_factory=list)
    is_free: torch.Event | None = None


class P2PChannel:
    """Messages between this rank and the others of its pipeline.

    Args:
        names: Names of all tensors that are sent, the same on all ranks.
        ranks: The pipeline's ranks, as ranks of the world.
        index: This rank's position among them.
        channels: Process groups by the positions of sender and receiver, as `make_channels` returns them.
        device: The device of the tensors.
    """

    def __init__(
        self,
        names: Collection[str],
        ranks: Sequence[int],
        index: int,
        channels: Mapping[tuple[int, int], ProcessGroup],
        device: torch.device,
    ) -> None:
        self._names, self._ranks, self._index, self._device = sorted(names), ranks, index, device
        self._channels = channels
        has_cpu = all("cpu:" in dist.get_backend_config(group) for group in channels.values())
        self._header_device = torch.device("cpu") if has_cpu else device
        self._asks_ahead = device.type == "cpu"
        self._receives = CopyStream(device)
        self._sent: dict[SendHandle, None] = {}
        self._headers: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        self._expected: dict[int, deque[_Expected]] = {}
        self._usual_to: dict[int, _ShapeHint] = {rank: _ShapeHint() for rank in range(len(ranks))}
        self._usual_from: dict[int, _ShapeHint] = {rank: _ShapeHint() for rank in range(len(ranks))}

    def connect(self) -> None:
        """Send a first message through each channel between ranks on devices, one channel after the other.

        Where NCCL is not bound to a device, it makes a communicator when it is first used, and blocks the host until
        both ranks have come. Ranks that come to several in different orders would wait for each other.

        Collective: every rank of the pipeline.
        """
        if self._device.type == "cpu":
            return
        for sender, receiver in sorted(self._channels, key=lambda pair: (min(pair), max(pair), pair)):
            message = torch.zeros(1, device=self._device)
            start = self._start(message, receiver) if self._index == sender else self._ask(message, sender)
            start[0].wait()

    def send(self, tensors: Mapping[str, Tensor] | None, to: int, kind: Hashable = None) -> SendHandle:
        """Start sending tensors; they must not be changed before `release` or `finish`.

        Args:
            tensors: By name; of each, whether it requires a gradient is told as well. ``None`` tells that this rank
                has failed.
            to: Position of the receiver.
            kind: What messages are like each other in shapes; the receiver must `expect` the same.

        Collective: the receiver must `receive`.
        """
        given = tensors or {}
        follow = [given[name] for name in self._names if name in given and given[name].numel()]
        layout = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in follow)
        asked = self._usual_to[to].of(kind) if self._asks_ahead else ()
        header = self._header(((tensors is None,), *(_described(given.get(name)) for name in self._names)))
        parts = [tensor.detach().contiguous() for tensor in follow]
        if layout != asked:
            parts = [torch.zeros(shape, dtype=dtype, device=self._device) for dtype, shape in asked] + parts
        # Apart from tensors, a header tells that these have been started.
        parts = [header, *parts] if self._header_device == self._device else [*parts, header]
        if tensors is not None:
            self._usual_to[to].note(kind, layout)
        sent = SendHandle([self._start(part, to) for part in parts])
        self._sent[sent] = None
        return sent

    def hand_on(self, own: Sequence[int], after: Callable[[list[int]], list[int]]) -> list[int]:
        """Return what this rank makes of numbers that come from the first rank, each rank handing on what it makes.

        Args:
            own: The first rank's numbers; on others, of the same length.
            after: Called with what the rank before has made, on all ranks but the first.

        Collective: every rank of the pipeline; nothing else is expected of the rank before meanwhile.
        """
        made = [*own]
        if self._index > 0:
            work, told = self._ask(
                torch.empty(len(made), dtype=torch.int64, device=self._header_device), self._index - 1
            )
            with WAITS:
                work.wait()
            made = after(told.tolist())
        if self._index + 1 < len(self._ranks):
            told = torch.tensor(made, dtype=torch.int64, device=self._header_device)
            self._sent[SendHandle([self._start(told, self._index + 1)])] = None
        return made

    def expect(self, sender: int, kind: Hashable = None) -> None:
        """Ask for the next message from a rank, so that it travels while something else is done.

        Args:
            sender: Position of the rank. All that was expected of it before must have been received.
            kind: As the sender gives it to `send`.
        """
        layout = self._usual_from[sender].of(kind)
        header = self._ask_header(sender) if self._header_device.type == "cpu" else None
        expected = _Expected(kind, layout, header, self._rooms(layout))
        if self._asks_ahead:
            expected.works = [self._ask(room, sender)[0] for room in expected.rooms]
        elif layout:
            expected.is_free = torch.accelerator.current_stream(self._device).record_event()
        self._expected.setdefault(sender, deque()).append(expected)

    def receive(self, sender: int) -> dict[str, Tensor] | None:
        """Return the next message from a rank; differentiable tensors come as leaves that require a gradient.

        Args:
            sender: Position of the rank, of which a message is expected.

        Returns:
            The tensors by name; ``None`` where the sender, or a rank that it waits for, has failed.

        Collective: the sender must `send`.
        """
        expected = self._expected[sender].popleft()
        work, header = expected.header or self._ask_header(sender)
        with WAITS:
            work.wait()
        (has_failed, *_), *rows = header.tolist()
        found = {
            name: (bool(is_differentiable), _DTYPES[dtype], tuple(sizes[:num_dims]))
            for name, (is_present, is_differentiable, dtype, num_dims, *sizes) in zip(self._names, rows, strict=True)
            if is_present
        }
        layout = tuple((dtype, shape) for _, dtype, shape in found.values() if 0 not in shape)
        rooms, works = expected.rooms, expected.works
        if layout != expected.layout:
            for each in works:  # what fills the room
                each.wait()
            rooms = self._rooms(layout)
            works = [self._ask(room, sender)[0] for room in rooms]
        elif not self._asks_ahead:
            self._receives.wait(expected.is_free)
            with self._receives.own_order():
                works = [self._ask(room, sender)[0] for room in rooms]
        with WAITS:
            for each in works:
                each.wait()
        if has_failed:
            return None
        self._usual_from[sender].note(expected.kind, layout)
        filled = iter(rooms)
        return {
            name: (torch.empty(shape, dtype=dtype, device=self._device) if 0 in shape else next(filled)).requires_grad_(
                is_differentiable
            )
            for name, (is_differentiable, dtype, shape) in found.items()
        }

    def release(self, sent: SendHandle) -> None:
        """Return once a message has left, and keep its tensors alive no longer."""
        self._sent.pop(sent, None)
        sent.finish()

    def finish(self) -> None:
        """Return once everything that was sent has left."""
        for sent in [*self._sent]:
            self.release(sent)

    def _header(self, rows: tuple[tuple[int, ...], ...]) -> Tensor:
        """Return the header of some rows; the one before, which nobody writes to, where they are the same."""
        known = self._headers.get(rows)
        if known is None:
            if len(self._headers) >= _MOST_HEADERS:
                self._headers.clear()
            known = torch.tensor([[*row, *[0] * (_FIELDS - len(row))] for row in rows]).to(self._header_device)
            self._headers[rows] = known
        return known

    def _rooms(self, layout: Layout) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in layout]

    def _start(self, tensor: Tensor, to: int) -> tuple[Any, Tensor]:
        group = self._channels[self._index, to]
        return dist.isend(_as_sent(tensor), dst=self._ranks[to], group=group), tensor

    def _ask_header(self, sender: int) -> tuple[Any, Tensor]:
        header = torch.empty(1 + len(self._names), _FIELDS, dtype=torch.int64, device=self._header_device)
        return self._ask(header, sender)

    def _ask(self, tensor: Tensor, sender: int) -> tuple[Any, Tensor]:
        group = self._channels[sender, self._index]
        return dist.irecv(_as_sent(tensor), src=self._ranks[sender], group=group), tensor


def _described(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the entries of a header for a tensor."""
    if tensor is None:
        return ()
    return (1, tensor.requires_grad, _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape)


def make_channels(pipelines: Sequence[Sequence[int]]) -> dict[tuple[int, int], ProcessGroup]:
    """Make a process group for each direction between neighbours in a pipeline; the last rank is one of the first.

    Args:
        pipelines: The ranks of each pipeline, as ranks of the world; the same on every rank, and each rank in one.

    Returns:
        This rank's groups, by the positions of sender and receiver in its pipeline.

    Collective: every rank of the world.
    """
    rank, size = dist.get_rank(), len(pipelines[0])
    index = next(list(ranks).index(rank) for ranks in pipelines if rank in ranks)
    channels = {}
    for apart in _disjoint({(min(one, other), max(one, other)) for one in range(size) for other in [(one + 1) % size]}):
        own = next((pair for pair in apart if index in pair), None)
        for is_upward in (True, False):
            group = new_groups([[ranks[low], ranks[high]] for ranks in pipelines for low, high in apart])
            if own is not None and group is not None:
                channels[own if is_upward else own[::-1]] = group
    return channels


def _disjoint(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return pairs in as few lists as a walk through them finds, in each of which every number is in one pair."""
    found: list[list[tuple[int, int]]] = []
    for pair in sorted(pair for pair in pairs if pair[0] != pair[1]):
        free = next((each for each in found if not any(set(pair) & set(other) for other in each)), None)
        if free is None:
            found.append(free := [])
        free.append(pair)
    return found


def _as_sent(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes where a backend may lack its format, as NCCL has no int16 and no complex."""
    return tensor if tensor.device.type == "cpu" else byte_view(tensor)
