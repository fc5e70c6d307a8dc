"""The one door to collectives on flat buffers, each in the form that is fastest for where its tensors lie.

On the CPU, over gloo, torch's reduce-scatter is an all-reduce in disguise, and its gathers copy. There, slices travel
point to point: straight out of the sender's buffer, and into views of the receiver's. Sums are ours, in rank order and
in fp32 for narrow formats, so that a result depends neither on timing nor on which elements share a buffer. Elsewhere
torch's own collectives do the work.

A flat buffer is cut into one slice per rank of the group by ``bounds``: rank ``r`` holds
``buffer[bounds[r]:bounds[r + 1]]``. Slices may be uneven or empty.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

_REDUCE_TAG, _GATHER_TAG = 7001, 7002
"""Tags of messages between two ranks, apart from the default 0 of what users send."""

_BLOCK_NUMEL = 1 << 16
"""Sums are taken in blocks of this many elements, so that what follows the first pass finds them in the cache."""

_NARROW = (torch.bfloat16, torch.float16)


class Pending:
    """A collective that has been started. `wait` ends it, and may be called again.

    Args:
        works: What has to end.
        finish: Called once after that, on the waiting thread.

    Buffers that take part must be left alone until `wait` has returned; the object keeps them alive.
    """

    def __init__(self, works: Sequence[Any] = (), finish: Callable[[], None] | None = None, keep: Any = None) -> None:
        self._works = list(works)
        self._finish = finish
        self._keep = keep

    def wait(self) -> None:
        """Return once the result is there.

        Collective: none; the collective itself was entered when it was started.
        """
        works, self._works = self._works, []
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._keep = None


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
        out: This rank's slice of the sum, any floating dtype; written by ``wait``. Narrow formats are summed in fp32.
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
        return Pending(finish=lambda: _sum_into(out, [own], scale=scale, accumulate=accumulate))
    if source.device.type != "cpu":
        return _native_reduce_scatter(source, bounds, out, group, scale=scale, accumulate=accumulate)
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
    own = _overlaps(parts, low, bounds[rank + 1])
    received = _received(own, size - 1, scratch)
    works, sums = [], []
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
            for start in range(0, target.numel(), _BLOCK_NUMEL):
                block = slice(start, start + _BLOCK_NUMEL)
                _sum_into(target[block], [term[block] for term in terms], scale=scale, accumulate=accumulate)

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
        return _native_all_gather(buffer, bounds, group)
    works = []
    for distance in range(1, size):
        sender, receiver = (rank - distance) % size, (rank + distance) % size
        theirs = buffer[bounds[sender] : bounds[sender + 1]]
        if theirs.numel():
            works.append(dist.irecv(theirs, group=group, group_src=sender, tag=_GATHER_TAG))
        if own.numel():
            works.append(dist.isend(own, group=group, group_dst=receiver, tag=_GATHER_TAG))
    return Pending(works, keep=buffer)


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


def _sum_into(out: Tensor, parts: Sequence[Tensor], *, scale: float, accumulate: bool) -> None:
    """Write or add ``scale`` times the sum of parts, taken in their order; see `reduce_scatter`."""
    if out.dtype in _NARROW:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        if scale != 1.0:
            total.mul_(scale)
        if accumulate:
            total.add_(out)
        out.copy_(total)
        return
    if accumulate:
        for part in parts:
            out.add_(part, alpha=scale)
        return
    if len(parts) > 1 and all(part.dtype == out.dtype for part in parts[:2]):
        torch.add(parts[0], parts[1], out=out)
        rest = parts[2:]
    else:
        out.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        out.add_(part)
    if scale != 1.0:
        out.mul_(scale)


def _is_even(bounds: Sequence[int]) -> bool:
    step = bounds[1] - bounds[0]
    return all(after - before == step for before, after in pairwise(bounds))


def _native_reduce_scatter(
    source: Tensor, bounds: Sequence[int], out: Tensor, group: ProcessGroup | None, *, scale: float, accumulate: bool
) -> Pending:
    rank = dist.get_rank(group)
    own = source.new_empty(bounds[rank + 1] - bounds[rank])
    if _is_even(bounds):
        # torch 2.13 renamed it, and warns of the old name; older versions know no other.
        call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = call(own, source, group=group, async_op=True)
    else:
        slices = [source[start:stop] for start, stop in pairwise(bounds)]
        work = dist.reduce_scatter(own, slices, group=group, async_op=True)
    return Pending([work], lambda: _sum_into(out, [own], scale=scale, accumulate=accumulate), keep=source)


def _native_all_gather(buffer: Tensor, bounds: Sequence[int], group: ProcessGroup | None) -> Pending:
    rank = dist.get_rank(group)
    own = buffer[bounds[rank] : bounds[rank + 1]]
    if _is_even(bounds):
        call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = call(buffer, own, group=group, async_op=True)
    else:
        slices = [buffer[start:stop] for start, stop in pairwise(bounds)]
        work = dist.all_gather(slices, own, group=group, async_op=True)
    return Pending([work], keep=buffer)
