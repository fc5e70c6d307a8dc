"""The one door to collectives on flat buffers, each in the form that is fastest for where its tensors lie.

On the CPU, ranks of one host read each other's memory, see `booster_runtime.collectives.direct`. Between hosts, over
gloo, torch's reduce-scatter is an all-reduce in disguise, and its gathers copy; there, slices travel point to point:
straight out of the sender's buffer, and into views of the receiver's. Sums are ours either way, in rank order and in
fp32 for narrow formats, so that a result depends neither on timing nor on which elements share a buffer. On devices
torch's own collectives do the work, and sum in the format that travels.

A flat buffer is cut into one slice per rank of the group by ``bounds``: rank ``r`` holds
``buffer[bounds[r]:bounds[r + 1]]``. Slices may be uneven or empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_runtime.collectives import native
from booster_runtime.collectives.direct import channel_of
from booster_runtime.collectives.direct.operations import (
    COMBINED,
    SMALL_BYTES,
    SUMMED,
    AllGather,
    AllToAll,
    Broadcast,
    LargeAllReduce,
    ReduceScatter,
    SmallAllReduce,
)
from booster_runtime.collectives.pending import Pending
from booster_runtime.collectives.sums import BLOCK_NUMEL, sum_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = [
    "Pending",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_parts",
    "sum_into",
]

_REDUCE_TAG, _GATHER_TAG, _EXCHANGE_TAG = 7001, 7002, 7003
"""Tags of messages between two ranks, apart from the default 0 of what users send."""


def reduce_scatter(
    source: Tensor,
    bounds: Sequence[int],
    out: Tensor,
    group: ProcessGroup | None = None,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
) -> Pending:
    """Start summing a flat buffer over ranks, of which each rank receives its slice.

    Args:
        source: Shape ``(bounds[-1],)``, contiguous; its dtype is the one that travels.
        bounds: Where slices begin and end, one entry more than ranks.
        out: This rank's slice of the sum, any floating dtype; written by ``wait``. CPUs sum narrow formats in
            fp32.
        group: The ranks that take part; ``None`` for all.
        scale: Multiplies the sum.
        accumulate: Add to ``out`` instead of replacing it.

    Returns:
        What to wait for before ``out`` is read and ``source`` is written.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = source[bounds[rank] : bounds[rank + 1]]
    if size == 1:
        return Pending(finish=lambda: sum_into(out, [own], scale=scale, accumulate=accumulate))
    if source.device.type != "cpu":
        return native.reduce_scatter(source, bounds, out, group, scale=scale, accumulate=accumulate)
    return reduce_scatter_parts([(0, source)], bounds, out, group, scale=scale, accumulate=accumulate)


def reduce_scatter_parts(
    parts: Sequence[tuple[int, Tensor]],
    bounds: Sequence[int],
    out: Tensor,
    group: ProcessGroup | None = None,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    scratch: Tensor | None = None,
) -> Pending:
    """Start summing, over ranks, a flat buffer that lies in parts, without putting them together first.

    Args:
        parts: Where each part begins in the buffer, and its values: 1-D, contiguous, on the CPU, all of one dtype.
            Parts don't overlap; offsets and lengths are the same on every rank.
        bounds: Where slices begin and end, one entry more than ranks.
        out: This rank's slice of the sum, on the CPU; of what no part covers, it keeps what it has.
        group: The ranks that take part; ``None`` for all.
        scale: Multiplies the sum.
        accumulate: Add to ``out`` instead of replacing it.
        scratch: 1-D memory of the parts' dtype to receive into, left alone until the result has been waited for: new
            memory costs as much as a copy. What does not fit is allocated.

    Returns:
        What to wait for before ``out`` is read and the parts are written.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    low = bounds[rank]
    channel = channel_of(group)
    if channel is not None:
        placed = [
            (index, start - offset, slice(start - low, start - low + piece.numel()))
            for index, (offset, part) in enumerate(parts)
            for start, piece in _overlaps([(offset, part)], low, bounds[rank + 1])
        ]
        layout = [offset for offset, _ in parts] + list(bounds)
        summed = ReduceScatter([part for _, part in parts], layout, placed, out, scale=scale, accumulate=accumulate)
        channel.start(summed)
        return Pending([summed])
    own = _overlaps(parts, low, bounds[rank + 1])
    received = _received(own, size - 1, scratch)
    works: list[Any] = []
    sums: list[Any] = []
    for position, (offset, part) in enumerate(own):
        # In rank order, so that the sum does not depend on who takes it.
        terms = [part if peer == rank else received[position][peer - (peer > rank)] for peer in range(size)]
        sums.append((out[offset - low : offset - low + part.numel()], terms))
    # Each rank turns to its next neighbour first, so that no rank is every other's first.
    for distance in range(1, size):
        sender, receiver = (rank - distance) % size, (rank + distance) % size
        works += [dist.irecv(terms[sender], group=group, group_src=sender, tag=_REDUCE_TAG) for _, terms in sums]
        works += [
            dist.isend(part, group=group, group_dst=receiver, tag=_REDUCE_TAG)
            for _, part in _overlaps(parts, bounds[receiver], bounds[receiver + 1])
        ]

    def add_up() -> None:
        for target, terms in sums:
            for start in range(0, target.numel(), BLOCK_NUMEL):
                block = slice(start, start + BLOCK_NUMEL)
                sum_into(target[block], [term[block] for term in terms], scale=scale, accumulate=accumulate)

    return Pending(works, add_up, keep=parts)


def _received(own: Sequence[tuple[int, Tensor]], senders: int, scratch: Tensor | None) -> list[Tensor]:
    """Return room for what each sender has of each part."""
    rooms, used = [], 0
    for _, part in own:
        numel = senders * part.numel()
        if scratch is not None and used + numel <= scratch.numel():
            rooms.append(scratch[used : used + numel].view(senders, part.numel()))
            used += numel
        else:
            rooms.append(part.new_empty((senders, part.numel())))
    return rooms


def _overlaps(parts: Sequence[tuple[int, Tensor]], low: int, high: int) -> list[tuple[int, Tensor]]:
    """Return what of the parts lies in a range of the buffer."""
    found = []
    for offset, part in parts:
        start, stop = max(offset, low), min(offset + part.numel(), high)
        if start < stop:
            found.append((start, part[start - offset : stop - offset]))
    return found


def all_gather(buffer: Tensor, bounds: Sequence[int], group: ProcessGroup | None = None) -> Pending:
    """Start filling a flat buffer, of which each rank has its own slice, with the slices of the others, in place.

    Args:
        buffer: Shape ``(bounds[-1],)``, contiguous, any dtype.
        bounds: Where slices begin and end, one entry more than ranks.
        group: The ranks that take part; ``None`` for all.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return Pending()
    own = buffer[bounds[rank] : bounds[rank + 1]]
    if buffer.device.type != "cpu":
        return native.all_gather(buffer, bounds, group)
    channel = channel_of(group)
    if channel is not None:
        gathered = AllGather(buffer, bounds)
        channel.start(gathered)
        return Pending([gathered])
    works: list[Any] = []
    for distance in range(1, size):
        sender, receiver = (rank - distance) % size, (rank + distance) % size
        theirs = buffer[bounds[sender] : bounds[sender + 1]]
        if theirs.numel():
            works.append(dist.irecv(theirs, group=group, group_src=sender, tag=_GATHER_TAG))
        if own.numel():
            works.append(dist.isend(own, group=group, group_dst=receiver, tag=_GATHER_TAG))
    return Pending(works, keep=buffer)


def all_to_all(
    source: Tensor,
    sent: Sequence[int],
    out: Tensor,
    received: Sequence[int],
    group: ProcessGroup | None = None,
) -> Pending:
    """Start sending each rank its slice of a flat buffer, and receiving every rank's slice for this one.

    Between ranks that have nothing for each other nothing travels, so this is also the way to pass something on to
    one neighbour.

    Args:
        source: Shape ``(sent[-1],)``, contiguous, any dtype.
        sent: Where the slice for each rank begins and ends in ``source``, one entry more than ranks.
        out: Shape ``(received[-1],)``, contiguous, of the same dtype; apart from ``source``.
        received: Where the slice of each rank begins and ends in ``out``; as long as that rank's ``sent`` says.
        group: The ranks that take part; ``None`` for all.

    Returns:
        What to wait for before ``out`` is read and ``source`` is written.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if source.device.type != "cpu" and size > 1:
        return native.all_to_all(source, sent, out, received, group)
    slices = [source[sent[peer] : sent[peer + 1]] for peer in range(size)]
    outs = [out[received[peer] : received[peer + 1]] for peer in range(size)]
    outs[rank].copy_(slices[rank])
    if size == 1:
        return Pending()
    channel = channel_of(group)
    if channel is not None:
        exchanged = AllToAll(slices, outs)
        channel.start(exchanged)
        return Pending([exchanged])
    works: list[Any] = []
    for distance in range(1, size):
        sender, receiver = (rank - distance) % size, (rank + distance) % size
        if outs[sender].numel():
            works.append(dist.irecv(outs[sender], group=group, group_src=sender, tag=_EXCHANGE_TAG))
        if slices[receiver].numel():
            works.append(dist.isend(slices[receiver], group=group, group_dst=receiver, tag=_EXCHANGE_TAG))
    return Pending(works, keep=(source, out))


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: ProcessGroup | None = None) -> Pending:
    """Start combining a tensor over ranks, in place and to the same bits on each.

    Args:
        tensor: Any shape; contiguous.
        op: A ``torch.distributed.ReduceOp`` that the backend has.
        group: The ranks that take part; ``None`` for all.

    Collective: every rank of ``group``.
    """
    if dist.get_world_size(group) == 1:
        return Pending()
    is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_complex()
    if is_plain and (op in SUMMED or (op in COMBINED and is_small)):
        channel = channel_of(group)
        if channel is not None and (is_small or tensor.is_floating_point()):
            combined = SmallAllReduce(tensor, op) if is_small else LargeAllReduce(tensor, op)
            channel.start(combined)
            return Pending([combined])
    return Pending([dist.all_reduce(tensor, op, group=group, async_op=True)], keep=tensor)


def broadcast(tensor: Tensor, group: ProcessGroup | None = None) -> Pending:
    """Start sending the first rank's tensor to the others of a group, in place.

    Args:
        tensor: Any shape; contiguous.
        group: The ranks that take part; ``None`` for all.

    Collective: every rank of ``group``.
    """
    if dist.get_world_size(group) == 1:
        return Pending()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        channel = channel_of(group)
        if channel is not None:
            copied = Broadcast(tensor)
            channel.start(copied)
            return Pending([copied])
    return Pending([dist.broadcast(tensor, group=group, group_src=0, async_op=True)], keep=tensor)


def all_gather_object(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's small Python object, in rank order.

    Collective: every rank of ``group``.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return [value]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group=group)
    return gathered
