"""Collectives that observers of this process see; used only while there are some (`booster_core.ranks.observed_by`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.ranks import ObservedCall
from booster_runtime.collectives.pending import Pending
from booster_runtime.collectives.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


class WatchedTransport(Transport):
    """Runs collectives over another transport, and shows them.

    How much is sent is what a ring sends, and all of a matrix, whatever the transport does.

    Args:
        inner: The transport that runs them.
        group: Its group; ``None`` for all ranks.
    """

    def __init__(self, inner: Transport, group: ProcessGroup | None) -> None:
        self._inner = inner
        self._world: ProcessGroup = dist.group.WORLD if group is None else group  # type: ignore[assignment] # there is one

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
        parts = [(0, source)] if isinstance(source, torch.Tensor) else source
        low, high = self._own(bounds)
        payload_bytes, own_bytes = 0, 0
        for offset, part in parts:
            inside = min(offset + part.numel(), high) - max(offset, low)
            payload_bytes += part.nbytes
            own_bytes += max(inside, 0) * part.element_size()
        return self._start(
            "reduce_scatter",
            payload_bytes,
            payload_bytes - own_bytes,
            lambda: self._inner.reduce_scatter(
                source, bounds, out, scale=scale, accumulate=accumulate, scratch=scratch
            ),
        )

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_gather`."""
        return self._start(
            "all_gather",
            buffer.nbytes,
            buffer.nbytes - self._own_bytes(bounds, buffer),
            lambda: self._inner.all_gather(buffer, bounds),
        )

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_to_all`."""
        return self._start(
            "all_to_all",
            source.nbytes,
            source.nbytes - self._own_bytes(sent, source),
            lambda: self._inner.all_to_all(source, sent, out, received),
        )

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:
        """See `booster_runtime.collectives.all_reduce`."""
        size = dist.get_world_size(self._world)
        sent_bytes = 2 * tensor.nbytes * (size - 1) // size
        return self._start("all_reduce", tensor.nbytes, sent_bytes, lambda: self._inner.all_reduce(tensor, op))

    def broadcast(self, tensor: Tensor) -> Pending:
        """See `booster_runtime.collectives.broadcast`."""
        return self._start("broadcast", tensor.nbytes, tensor.nbytes, lambda: self._inner.broadcast(tensor))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `booster_runtime.collectives.all_gather_object`; how large objects are is not known."""
        with ObservedCall("all_gather_object", group=self._world):
            return self._inner.all_gather_object(value)

    def _start(self, name: str, payload_bytes: int, sent_bytes: int, operation: Callable[[], Pending]) -> Pending:
        """Start an operation, and show it and later the wait for it, which has no bytes of its own."""
        with ObservedCall(name, group=self._world, payload_bytes=payload_bytes, sent_bytes=sent_bytes):
            pending = operation()
        return Pending([_ObservedWait(pending, name, self._world)])

    def _own(self, bounds: Sequence[int]) -> tuple[int, int]:
        rank = dist.get_rank(self._world)
        return bounds[rank], bounds[rank + 1]

    def _own_bytes(self, bounds: Sequence[int], like: Tensor) -> int:
        low, high = self._own(bounds)
        return (high - low) * like.element_size()


class _ObservedWait:
    """The wait for an operation, shown under the operation's name."""

    def __init__(self, pending: Pending, name: str, group: ProcessGroup | None) -> None:
        self._pending, self._name, self._group = pending, name, group

    def wait(self) -> None:
        with ObservedCall(self._name, group=self._group):
            self._pending.wait()
