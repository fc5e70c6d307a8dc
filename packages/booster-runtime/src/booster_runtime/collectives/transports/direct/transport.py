"""The direct transport: collectives on the CPU by reading memory, everything else by the portable transport."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from booster_runtime.collectives.flat import overlaps
from booster_runtime.collectives.pending import Pending
from booster_runtime.collectives.sums import COMBINED, SUMMED
from booster_runtime.collectives.transports.direct.operations import (
    SMALL_BYTES,
    AllGather,
    AllToAll,
    Broadcast,
    LargeAllReduce,
    Operation,
    ReduceScatter,
    SmallAllReduce,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_runtime.collectives.transports.direct.channel import Channel
    from booster_runtime.collectives.transports.protocol import Transport


class DirectTransport:
    """Collectives of ranks that can read each other's memory.

    Args:
        channel: The group's channel.
        portable: Takes what can't be read: tensors on devices, and objects.
    """

    name = "direct"

    def __init__(self, channel: Channel, portable: Transport) -> None:
        self._channel, self._portable = channel, portable

    def _start(self, operation: Operation) -> Pending:
        self._channel.start(operation)
        return Pending([operation])

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, scale: float, accumulate: bool
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter`."""
        if source.device.type != "cpu":
            return self._portable.reduce_scatter(source, bounds, out, scale=scale, accumulate=accumulate)
        return self.reduce_scatter_parts([(0, source)], bounds, out, scale=scale, accumulate=accumulate, scratch=None)

    def reduce_scatter_parts(
        self,
        parts: Sequence[tuple[int, Tensor]],
        bounds: Sequence[int],
        out: Tensor,
        *,
        scale: float,
        accumulate: bool,
        scratch: Tensor | None,  # noqa: ARG002 - others' terms are read in blocks
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter_parts`."""
        low, high = bounds[self._channel.rank], bounds[self._channel.rank + 1]
        own = [
            (index, start - offset, slice(start - low, start - low + piece.numel()))
            for index, (offset, part) in enumerate(parts)
            for start, piece in overlaps([(offset, part)], low, high)
        ]
        layout = [offset for offset, _ in parts] + list(bounds)
        tensors = [part for _, part in parts]
        return self._start(ReduceScatter(tensors, layout, own, out, scale=scale, accumulate=accumulate))

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_gather`."""
        if buffer.device.type != "cpu":
            return self._portable.all_gather(buffer, bounds)
        return self._start(AllGather(buffer, bounds))

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_to_all`."""
        if source.device.type != "cpu":
            return self._portable.all_to_all(source, sent, out, received)
        slices = [source[start:stop] for start, stop in pairwise(sent)]
        outs = [out[start:stop] for start, stop in pairwise(received)]
        outs[self._channel.rank].copy_(slices[self._channel.rank])
        return self._start(AllToAll(slices, outs))

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:
        """See `booster_runtime.collectives.all_reduce`."""
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_complex():
            if op in COMBINED and tensor.nbytes <= SMALL_BYTES:
                return self._start(SmallAllReduce(tensor, op))
            if op in SUMMED and tensor.is_floating_point():
                return self._start(LargeAllReduce(tensor, op))
        return self._portable.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor) -> Pending:
        """See `booster_runtime.collectives.broadcast`."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return self._portable.broadcast(tensor)
        return self._start(Broadcast(tensor))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `booster_runtime.collectives.all_gather_object`."""
        return self._portable.all_gather_object(value)
