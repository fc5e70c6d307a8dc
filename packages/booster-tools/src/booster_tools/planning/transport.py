"""The transport of a planned run, which sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from booster_runtime.collectives import Pending, Transport
from booster_tools.planning.answers import ANSWERED_NUMEL, repeat_into, times

if TYPE_CHECKING:
    from collections.abc import Sequence


class SilentTransport(Transport):
    """Communicates with nobody, and answers as if every rank of the group did what this one does.

    Args:
        rank: This rank's position in the group.
        size: Number of ranks of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

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
        """See `booster_runtime.collectives.reduce_scatter`; parts are not answered."""
        del scratch
        if not isinstance(source, Tensor):
            return Pending(keep=source)
        own = source[bounds[self._rank] : bounds[self._rank + 1]]

        def finish() -> None:
            total = own.to(out.dtype) * (scale * self._size)
            if accumulate:
                out.add_(total)
            else:
                out.copy_(total)

        return Pending(finish=finish if own.numel() <= ANSWERED_NUMEL else None, keep=source)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_gather`."""
        own = buffer[bounds[self._rank] : bounds[self._rank + 1]]
        if buffer.numel() <= ANSWERED_NUMEL and own.numel() * self._size == buffer.numel():
            repeat_into(buffer, own.clone())
        return Pending(keep=buffer)

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_to_all`."""
        del received
        own = source[sent[self._rank] : sent[self._rank + 1]]
        if max(source.numel(), out.numel()) <= ANSWERED_NUMEL:
            repeat_into(out, own.clone())
        return Pending(keep=(source, out))

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:
        """See `booster_runtime.collectives.all_reduce`."""
        if tensor.numel() <= ANSWERED_NUMEL:
            times(tensor, op, self._size)
        return Pending(keep=tensor)

    def broadcast(self, tensor: Tensor) -> Pending:
        """See `booster_runtime.collectives.broadcast`."""
        return Pending(keep=tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `booster_runtime.collectives.all_gather_object`."""
        return [value] * self._size
