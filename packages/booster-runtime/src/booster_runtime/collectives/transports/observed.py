"""Shows collectives to observers: how much each combines and sends, when it starts, and the wait for it.

Used only while somebody observes; see `booster_core.ranks.observed_by`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_core.ranks import ObservedCall
from booster_runtime.collectives.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from booster_runtime.collectives.transports.protocol import Transport


class ObservedTransport:
    """Shows the operations of another transport. Bytes that are sent are those of a ring, whatever the transport does.

    Args:
        inner: The transport that runs them.
        group: Its group; ``None`` for all ranks.
    """

    def __init__(self, inner: Transport, group: ProcessGroup | None) -> None:
        self._inner = inner
        self._group = dist.group.WORLD if group is None else group

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, scale: float, accumulate: bool
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter`."""
        return self.start(
            "reduce_scatter",
            source.nbytes,
            source.nbytes - self._own_bytes(bounds, source),
            lambda: self._inner.reduce_scatter(source, bounds, out, scale=scale, accumulate=accumulate),
        )

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
        payload_bytes, own_bytes = 0, 0
        rank = dist.get_rank(self._group)
        for offset, part in parts:
            inside = min(offset + part.numel(), bounds[rank + 1]) - max(offset, bounds[rank])
            payload_bytes += part.nbytes
            own_bytes += max(inside, 0) * part.element_size()
        return self.start(
            "reduce_scatter_parts",
            payload_bytes,
            payload_bytes - own_bytes,
            lambda: self._inner.reduce_scatter_parts(
                parts, bounds, out, scale=scale, accumulate=accumulate, scratch=scratch
            ),
        )

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_gather`."""
        sent_bytes = buffer.nbytes - self._own_bytes(bounds, buffer)
        return self.start("all_gather", buffer.nbytes, sent_bytes, lambda: self._inner.all_gather(buffer, bounds))

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_to_all`."""
        return self.start(
            "all_to_all",
            source.nbytes,
            source.nbytes - self._own_bytes(sent, source),
            lambda: self._inner.all_to_all(source, sent, out, received),
        )

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:
        """See `booster_runtime.collectives.all_reduce`."""
        size = dist.get_world_size(self._group)
        sent_bytes = 2 * tensor.nbytes * (size - 1) // size
        return self.start("all_reduce", tensor.nbytes, sent_bytes, lambda: self._inner.all_reduce(tensor, op))

    def broadcast(self, tensor: Tensor) -> Pending:
        """See `booster_runtime.collectives.broadcast`."""
        return self.start("broadcast", tensor.nbytes, tensor.nbytes, lambda: self._inner.broadcast(tensor))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `booster_runtime.collectives.all_gather_object`; how large objects are is not known."""
        with ObservedCall("all_gather_object", group=self._group):
            return self._inner.all_gather_object(value)

    def start(self, name: str, payload_bytes: int, sent_bytes: int, operation: Callable[[], Pending]) -> Pending:
        """Start an operation, and show it and later the wait for it, which has no bytes of its own.

        Args:
            name: The function of `booster_runtime.collectives`.
            payload_bytes: See `ObservedCall`.
            sent_bytes: See `ObservedCall`.
            operation: Starts it.

        Collective: the group.
        """
        with ObservedCall(name, group=self._group, payload_bytes=payload_bytes, sent_bytes=sent_bytes):
            pending = operation()
        return Pending([_ObservedWait(pending, name, self._group)])

    def _own_bytes(self, bounds: Sequence[int], like: Tensor) -> int:
        rank = dist.get_rank(self._group)
        return (bounds[rank + 1] - bounds[rank]) * like.element_size()


class _ObservedWait:
    """The wait for an operation, shown under the operation's name."""

    def __init__(self, pending: Pending, name: str, group: ProcessGroup | None) -> None:
        self._pending, self._name, self._group = pending, name, group

    def wait(self) -> None:
        with ObservedCall(self._name, group=self._group):
            self._pending.wait()
