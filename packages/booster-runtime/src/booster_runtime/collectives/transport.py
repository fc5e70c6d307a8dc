"""How collectives travel: a `Transport` per process group, made when the group is first used.

On the CPU, torch's reduce-scatter over gloo is an all-reduce, and its gathers copy. So slices are sent point to point,
out of the sender's buffer and into views of the receiver's, and every rank adds them up itself: in rank order, and in
fp32 for narrow dtypes. On devices torch's own collectives do the work, and reduce in the dtype that is sent.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.precision import NARROW
from booster_runtime.collectives.pending import Pending, Stages
from booster_runtime.collectives.sums import COMBINED, SUMMED, RowExchange, combine_into, overlaps, scale_of, sum_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

_REDUCE_TAG, _GATHER_TAG, _EXCHANGE_TAG, _COMBINE_TAG, _SPREAD_TAG = range(7001, 7006)
"""Tags of messages between two ranks; users send with the default tag 0. See `rows` for two more."""

SMALL_BYTES = 1 << 17
"""Tensors up to this size are sent whole to every rank. Measured on 2 and 4 ranks, that takes 0.3 to 0.9 of the time of
gloo's all-reduce up to here, and is slower from 1 MiB on."""
_MOST_SENT_BYTES, _MOST_PEERS = 3 * SMALL_BYTES, 15
"""The most of such tensors that a rank sends in all, and to how many others."""
_BLOCK_NUMEL = 1 << 16
"""On the CPU sums are computed in blocks of this many elements, which stay in the cache between passes."""


class Transport:
    """The collectives of one process group: each method does what the function of its name in the package says.

    Args:
        group: The group; only a weak reference is kept, so that groups can be freed.

    Attributes:
        size: Number of ranks of the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._reference = weakref.ref(group)
        self._rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._stages = Stages()

    @property
    def _group(self) -> ProcessGroup:
        group = self._reference()
        assert group is not None, "the caller of a collective holds its group"
        return group

    def is_by_torch(self, tensor: Tensor) -> bool:
        """Return whether torch's own collectives move a tensor."""
        return tensor.device.type != "cpu" and self.size > 1

    def reduce_scatter(
        self,
        source: Tensor | Sequence[tuple[int, Tensor]],
        bounds: Sequence[int],
        out: Tensor,
        *,
        scale: float,
        accumulate: bool,
        scratch: Tensor | None,
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter`."""
        if isinstance(source, torch.Tensor):
            if self.is_by_torch(source):
                return reduce_scatter_by_torch(source, bounds, out, self._group, scale=scale, accumulate=accumulate)
            source = [(0, source)]
        matrices = [(offset, part) for offset, part in source if part.dim() == 2 and self.size > 1]
        parts = [(offset, part.view(-1)) for offset, part in source if part.dim() < 2 or self.size == 1]
        works, sums = self._send_parts(parts, bounds, out, scratch, accumulate=accumulate)
        exchanges = []
        for offset, matrix in matrices:
            exchange, target = self._send_rows(offset, matrix, bounds, out)
            # As in `_combine_slices`.
            works.append(self._stages.add(exchange.start_receiving))
            exchanges.append((exchange, target))

        def add_up() -> None:
            for target, terms in sums:
                _sum_in_blocks(target, terms, scale=scale, accumulate=accumulate)
            for exchange, target in exchanges:
                exchange.add_up(target, scale=scale, accumulate=accumulate)

        return Pending(works, add_up, keep=source)

    def _send_parts(
        self,
        parts: Sequence[tuple[int, Tensor]],
        bounds: Sequence[int],
        out: Tensor,
        scratch: Tensor | None,
        *,
        accumulate: bool,
    ) -> tuple[list[Any], list[tuple[Tensor, list[Tensor]]]]:
        """Start sending slices of flat parts; return what to wait for, and what is to be summed then, and into what."""
        rank, low = self._rank, bounds[self._rank]
        own = overlaps(parts, low, bounds[rank + 1])
        num_in_place = 0 if accumulate else in_place_terms(self.size, parts[0][1].dtype if parts else None, out.dtype)
        received = _rooms(own, self.size - 1 - num_in_place, scratch)
        works: list[Any] = []
        sums: list[tuple[Tensor, list[Tensor]]] = []
        for room, (offset, part) in zip(received, own, strict=True):
            target = out[offset - low : offset - low + part.numel()]
            sums.append((target, self._in_rank_order(part, [*[target] * num_in_place, *room])))
        for sender, receiver in self._neighbours():
            works += [self._receive(terms[sender], sender, _REDUCE_TAG) for _, terms in sums]
            works += [
                self._send(part, receiver, _REDUCE_TAG)
                for _, part in overlaps(parts, bounds[receiver], bounds[receiver + 1])
            ]
        return works, sums

    def _send_rows(self, offset: int, matrix: Tensor, bounds: Sequence[int], out: Tensor) -> tuple[RowExchange, Tensor]:
        """Start sending the rows of a part of two dimensions that are not zero; return where their sum goes, too."""
        ends = [min(max(bound - offset, 0), matrix.numel()) for bound in bounds]
        exchange = RowExchange(matrix, ends, self._rank, self._neighbours(), self._send, self._receive)
        start = offset + ends[self._rank] - bounds[self._rank]
        return exchange, out[max(start, 0) :][: ends[self._rank + 1] - ends[self._rank]]

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_gather`."""
        if self.is_by_torch(buffer):
            return all_gather_by_torch(buffer, bounds, self._rank, self._group)
        return Pending(self._spread(buffer, bounds, _GATHER_TAG), keep=buffer)

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_to_all`."""
        if self.is_by_torch(source):
            return all_to_all_by_torch(source, sent, out, received, self._group)
        slices = [source[start:stop] for start, stop in pairwise(sent)]
        outs = [out[start:stop] for start, stop in pairwise(received)]
        outs[self._rank].copy_(slices[self._rank])
        works: list[Any] = []
        for sender, receiver in self._neighbours():
            if outs[sender].numel():
                works.append(self._receive(outs[sender], sender, _EXCHANGE_TAG))
            if slices[receiver].numel():
                works.append(self._send(slices[receiver], receiver, _EXCHANGE_TAG))
        return Pending(works, keep=(source, out))

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:
        """See `booster_runtime.collectives.all_reduce`."""
        if self.size == 1:
            return Pending()
        is_ours = not self.is_by_torch(tensor) and tensor.is_contiguous() and not tensor.is_complex()
        # To every other rank is too much where there are many; what has no order to keep is gloo's then.
        peers = self.size - 1
        is_sent_whole = op in SUMMED or (peers <= _MOST_PEERS and tensor.nbytes * peers <= _MOST_SENT_BYTES)
        if is_ours and tensor.numel() and op in COMBINED and tensor.nbytes <= SMALL_BYTES and is_sent_whole:
            return self._combine_whole(tensor.view(-1), op)
        if is_ours and op in SUMMED and tensor.is_floating_point() and not self._sums_exactly(tensor, op):
            return self._combine_slices(tensor.view(-1), op)
        if is_ours and op == dist.ReduceOp.AVG and tensor.is_floating_point():
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
            return Pending([work], lambda: _scale(tensor, scale_of(op, self.size)), keep=tensor)
        return Pending([dist.all_reduce(tensor, op, group=self._group, async_op=True)], keep=tensor)

    def _sums_exactly(self, tensor: Tensor, op: Any) -> bool:
        """Return whether torch's own sum over gloo has the bits of a sum in rank order and fp32.

        With two terms there is one order and one rounding. An average of narrow numbers could overflow in their sum.
        """
        return self.size == 2 and (op == dist.ReduceOp.SUM or tensor.dtype not in NARROW)

    def broadcast(self, tensor: Tensor) -> Pending:
        """See `booster_runtime.collectives.broadcast`."""
        if self.size == 1:
            return Pending()
        return Pending([dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)], keep=tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `booster_runtime.collectives.all_gather_object`."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _combine_whole(self, flat: Tensor, op: Any) -> Pending:
        """Send the whole tensor to every rank, and let each compute the result: one message each way."""
        terms = self._in_rank_order(flat, flat.new_empty((self.size - 1, flat.numel())))
        works: list[Any] = []
        for sender, receiver in self._neighbours():
            works.append(self._receive(terms[sender], sender, _COMBINE_TAG))
            works.append(self._send(flat, receiver, _COMBINE_TAG))

        def combine() -> None:
            for start in range(0, flat.numel(), _BLOCK_NUMEL):
                block = slice(start, start + _BLOCK_NUMEL)
                combine_into(flat[block], [term[block] for term in terms], op)

        return Pending(works, combine, keep=flat)

    def _combine_slices(self, flat: Tensor, op: Any) -> Pending:
        """Let each rank sum its slice, then send the sum to the others: two messages each way, of fewer bytes."""
        bounds = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        own = flat[bounds[self._rank] : bounds[self._rank + 1]]
        terms = self._in_rank_order(own, flat.new_empty((self.size - 1, own.numel())))
        works: list[Any] = []
        for sender, receiver in self._neighbours():
            works.append(self._receive(terms[sender], sender, _COMBINE_TAG))
            works.append(self._send(flat[bounds[receiver] : bounds[receiver + 1]], receiver, _COMBINE_TAG))

        def sum_and_spread() -> list[Any]:
            for work in works:
                work.wait()
            _sum_in_blocks(own, terms, scale=scale_of(op, self.size), accumulate=False)
            return self._spread(flat, bounds, _SPREAD_TAG)

        # In the order of the calls: ranks may wait for several operations in different orders.
        return Pending([self._stages.add(sum_and_spread)], keep=flat)

    def _spread(self, buffer: Tensor, bounds: Sequence[int], tag: int) -> list[Any]:
        """Start sending this rank's slice to the others, and receiving theirs."""
        own = buffer[bounds[self._rank] : bounds[self._rank + 1]]
        works: list[Any] = []
        for sender, receiver in self._neighbours():
            theirs = buffer[bounds[sender] : bounds[sender + 1]]
            if theirs.numel():
                works.append(self._receive(theirs, sender, tag))
            if own.numel():
                works.append(self._send(own, receiver, tag))
        return works

    def _in_rank_order(self, own: Tensor, received: Sequence[Tensor] | Tensor) -> list[Tensor]:
        """Return every rank's term: this rank's, and what the others' are received into, in their order."""
        return [own if peer == self._rank else received[peer - (peer > self._rank)] for peer in range(self.size)]

    def _neighbours(self) -> list[tuple[int, int]]:
        """Return whom to receive from and send to, step by step; no rank is every other's first."""
        return [
            ((self._rank - distance) % self.size, (self._rank + distance) % self.size)
            for distance in range(1, self.size)
        ]

    def _send(self, tensor: Tensor, receiver: int, tag: int) -> Any:
        return dist.isend(tensor, group=self._group, group_dst=receiver, tag=tag)

    def _receive(self, tensor: Tensor, sender: int, tag: int) -> Any:
        return dist.irecv(tensor, group=self._group, group_src=sender, tag=tag)


def in_place_terms(size: int, wire: torch.dtype | None, dtype: torch.dtype) -> int:
    """Return how many of the others' terms `reduce_scatter` receives where their sum goes, if it is not added to.

    That of the first other rank is among the first two of a sum in rank order, which may be what they replace.

    Args:
        size: Number of ranks.
        wire: Format in which they travel.
        dtype: Format of the sum.
    """
    return int(size > 1 and wire == dtype)


def _rooms(own: Sequence[tuple[int, Tensor]], senders: int, scratch: Tensor | None) -> list[Tensor]:
    """Return memory for what each sender has of each part: from ``scratch`` while that lasts."""
    rooms, used = [], 0
    for _, part in own:
        numel = senders * part.numel()
        if scratch is not None and used + numel <= scratch.numel():
            rooms.append(scratch[used : used + numel].view(senders, part.numel()))
            used += numel
        else:
            rooms.append(part.new_empty((senders, part.numel())))
    return rooms


def _scale(tensor: Tensor, factor: float) -> None:
    tensor.mul_(factor)


def _sum_in_blocks(out: Tensor, terms: Sequence[Tensor], *, scale: float, accumulate: bool) -> None:
    numel = _BLOCK_NUMEL if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), numel):
        block = slice(start, start + numel)
        sum_into(out[block], [term[block] for term in terms], scale=scale, accumulate=accumulate)


def _is_even(bounds: Sequence[int]) -> bool:
    if isinstance(bounds, range):
        return True
    step = bounds[1] - bounds[0]
    return all(after - before == step for before, after in pairwise(bounds))


def reduce_scatter_by_torch(
    source: Tensor, bounds: Sequence[int], out: Tensor, group: ProcessGroup | None, *, scale: float, accumulate: bool
) -> Pending:
    """Start summing a flat buffer over ranks; see `booster_runtime.collectives.reduce_scatter`."""
    is_in_place = not accumulate and out.dtype == source.dtype
    own = out if is_in_place else source.new_empty(out.numel())
    op, of_average = dist.ReduceOp.SUM, scale * (len(bounds) - 1)
    is_average = math.isclose(of_average, 1.0)
    # A sum of scaled gradients may overflow where their average does not; and what is there already is not scaled.
    if source.dtype == torch.float16 or (is_in_place and is_average):
        op, scale = dist.ReduceOp.AVG, 1.0 if is_average else of_average
    if _is_even(bounds):
        # torch 2.13 renamed it, and warns of the old name; older versions know no other.
        call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = call(own, source, op, group=group, async_op=True)
    else:
        slices = [source[start:stop] for start, stop in pairwise(bounds)]
        work = dist.reduce_scatter(own, slices, op, group=group, async_op=True)

    def finish() -> None:
        if not is_in_place:
            sum_into(out, [own], scale=scale, accumulate=accumulate)
        elif scale != 1.0:
            out.mul_(scale)

    return Pending([work], finish, keep=source)


def all_gather_by_torch(buffer: Tensor, bounds: Sequence[int], rank: int, group: ProcessGroup | None) -> Pending:
    """Start filling a flat buffer with the ranks' slices; see `booster_runtime.collectives.all_gather`."""
    own = buffer[bounds[rank] : bounds[rank + 1]]
    if _is_even(bounds):
        call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = call(buffer, own, group=group, async_op=True)
    else:
        slices = [buffer[start:stop] for start, stop in pairwise(bounds)]
        work = dist.all_gather(slices, own, group=group, async_op=True)
    return Pending([work], keep=buffer)


def all_to_all_by_torch(
    source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int], group: ProcessGroup | None
) -> Pending:
    """Start exchanging slices of flat buffers; see `booster_runtime.collectives.all_to_all`."""
    out_lengths, source_lengths = ([stop - start for start, stop in pairwise(bounds)] for bounds in (received, sent))
    work = dist.all_to_all_single(out, source, out_lengths, source_lengths, group=group, async_op=True)
    return Pending([work], keep=(source, out))


_transports: weakref.WeakKeyDictionary[ProcessGroup, Transport] = weakref.WeakKeyDictionary()
_factories: list[Callable[[ProcessGroup], Transport]] = []


def transport_of(group: ProcessGroup | None) -> Transport:
    """Return the transport of a group; ``None`` is the default group.

    Raises:
        ConfigError: If the monitor is to be told of calls, and none watches this run.

    Collective: none.
    """
    key = dist.group.WORLD if group is None else group
    if key is None:
        msg = "A collective needs a process group: start one by `booster_core.launch` or `init_process_group`."
        raise RuntimeError(msg)
    transport = _transports.get(key)
    if transport is None:
        transport = _transports[key] = (_factories[-1] if _factories else _make)(key)
    return transport


@contextlib.contextmanager
def made_by(factory: Callable[[ProcessGroup], Transport]) -> Iterator[None]:
    """Let a function make the transport of every group inside the block, as planning does for ranks that are not there.

    Args:
        factory: Called at a group's first collective.

    Collective: every rank.
    """
    global _transports  # noqa: PLW0603 - one lookup per collective, without a second one for the block
    outside, _transports = _transports, weakref.WeakKeyDictionary()
    _factories.append(factory)
    try:
        yield
    finally:
        _factories.pop()
        _transports = outside


def _make(group: ProcessGroup) -> Transport:
    return Transport(group)
