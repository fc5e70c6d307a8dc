"""Transports of a planned run: one that counts what another one does, and one that does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_runtime.collectives import Pending
from booster_tools.planning.answers import ANSWERED_NUMEL, repeat_into, times
from booster_tools.planning.messages import wire_of_all_reduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_runtime.collectives.transports import Transport
    from booster_tools.planning.hollow import Watching
    from booster_tools.planning.ledger import Ledger


class CountingTransport:
    """Counts each collective as a whole, whatever messages another transport makes of it.

    Args:
        inner: The transport that runs them.
        ledger: Where they are counted.
        watching: Told to leave out the messages inside.
        rank: This rank's position in the group.
        size: Number of ranks of the group.
    """

    def __init__(self, inner: Transport, ledger: Ledger, watching: Watching, rank: int, size: int) -> None:
        self._inner, self._ledger, self._watching = inner, ledger, watching
        self._rank, self._size = rank, size

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, scale: float, accumulate: bool
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter`."""
        self._count("reduce_scatter", source.numel() * source.element_size(), self._own(bounds, source))
        with self._watching.quiet():
            return self._quiet(self._inner.reduce_scatter(source, bounds, out, scale=scale, accumulate=accumulate))

    def reduce_scatter_parts(
        self,
        parts: Sequence[tuple[int, Tensor]],
        bounds: Sequence[int],
        out: Tensor,
        *,
        scale: float,
        accumulate: bool,
        scratch: Tensor | None,
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter_parts`."""
        whole, own = 0, 0
        low, high = bounds[self._rank], bounds[self._rank + 1]
        for offset, part in parts:
            whole += part.numel() * part.element_size()
            inside = max(min(offset + part.numel(), high) - max(offset, low), 0)
            own += inside * part.element_size()
        self._count("reduce_scatter", whole, own)
        with self._watching.quiet():
            pending = self._inner.reduce_scatter_parts(
                parts, bounds, out, scale=scale, accumulate=accumulate, scratch=scratch
            )
            return self._quiet(pending)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_gather`."""
        self._count("all_gather", buffer.numel() * buffer.element_size(), self._own(bounds, buffer))
        with self._watching.quiet():
            return self._quiet(self._inner.all_gather(buffer, bounds))

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_to_all`."""
        self._count("all_to_all", source.numel() * source.element_size(), self._own(sent, source))
        with self._watching.quiet():
            return self._quiet(self._inner.all_to_all(source, sent, out, received))

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:
        """See `booster_runtime.collectives.all_reduce`."""
        num_bytes = tensor.numel() * tensor.element_size()
        self._ledger.communicate("all_reduce", num_bytes, wire_of_all_reduce(num_bytes, self._size))
        with self._watching.quiet():
            return self._quiet(self._inner.all_reduce(tensor, op))

    def broadcast(self, tensor: Tensor) -> Pending:
        """See `booster_runtime.collectives.broadcast`."""
        self._count("broadcast", tensor.numel() * tensor.element_size(), 0)
        with self._watching.quiet():
            return self._quiet(self._inner.broadcast(tensor))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `booster_runtime.collectives.all_gather_object`; not counted, as the sizes of objects differ."""
        with self._watching.quiet():
            return self._inner.all_gather_object(value)

    def _own(self, bounds: Sequence[int], like: Tensor) -> int:
        return (bounds[self._rank + 1] - bounds[self._rank]) * like.element_size()

    def _count(self, kind: str, payload_bytes: int, own_bytes: int) -> None:
        self._ledger.communicate(kind, payload_bytes, payload_bytes - own_bytes)

    def _quiet(self, pending: Pending) -> Pending:
        def finish() -> None:
            with self._watching.quiet():
                pending.wait()

        return Pending(finish=finish)


class SilentTransport:
    """Communicates with nobody, and answers as if every rank of the group did what this one does.

    Args:
        rank: This rank's position in the group.
        size: Number of ranks of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, scale: float, accumulate: bool
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter`."""
        own = source[bounds[self._rank] : bounds[self._rank + 1]]

        def finish() -> None:
            total = own.to(out.dtype) * (scale * self._size)
            if accumulate:
                out.add_(total)
            else:
                out.copy_(total)

        return Pending(finish=finish if own.numel() <= ANSWERED_NUMEL else None, keep=source)

    def reduce_scatter_parts(
        self,
        parts: Sequence[tuple[int, Tensor]],
        bounds: Sequence[int],
        out: Tensor,
        *,
        scale: float,
        accumulate: bool,
        scratch: Tensor | None,
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter_parts`."""
        del bounds, out, scale, accumulate, scratch
        return Pending(keep=parts)

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
