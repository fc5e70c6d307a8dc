"""`BOOSTER_DEBUG=collectives`: ranks compare each collective before it runs, so a mismatch raises instead of hanging.

A wrapper around the group's transport. Without the variable there is no wrapper, and no cost.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_runtime.collectives.transports.agreement import Agreement, Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from booster_runtime.collectives.pending import Pending
    from booster_runtime.collectives.transports.protocol import Transport


class CheckedTransport:
    """Runs collectives over another transport once every rank has shown that it calls the same one.

    Args:
        inner: The transport that runs them.
        group: Its group.

    Each method raises `MismatchError` if the ranks' calls differ, and `MissingRanksError` at the group's time limit.
    """

    def __init__(self, inner: Transport, group: ProcessGroup) -> None:
        self.inner = inner
        self._agreement = Agreement(group)

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, scale: float, accumulate: bool
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter`."""
        lengths = _lengths(bounds)
        self._agreement.check(Call.here("reduce_scatter", source.dtype, lengths, f"scale {scale:g}"))
        return self.inner.reduce_scatter(source, bounds, out, scale=scale, accumulate=accumulate)

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
        ranges = [(offset, offset + part.numel()) for offset, part in parts]
        dtype = parts[0][1].dtype if parts else None
        self._agreement.check(Call.here("reduce_scatter_parts", dtype, _lengths(bounds), f"parts {ranges}"))
        return self.inner.reduce_scatter_parts(parts, bounds, out, scale=scale, accumulate=accumulate, scratch=scratch)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_gather`."""
        self._agreement.check(Call.here("all_gather", buffer.dtype, _lengths(bounds)))
        return self.inner.all_gather(buffer, bounds)

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_to_all`."""
        call = Call.here("all_to_all", source.dtype, sent=_lengths(sent), received=_lengths(received))
        self._agreement.check(call)
        return self.inner.all_to_all(source, sent, out, received)

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:
        """See `booster_runtime.collectives.all_reduce`."""
        self._agreement.check(Call.here("all_reduce", tensor.dtype, list(tensor.shape), _name_of(op)))
        return self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor) -> Pending:
        """See `booster_runtime.collectives.broadcast`."""
        self._agreement.check(Call.here("broadcast", tensor.dtype, list(tensor.shape)))
        return self.inner.broadcast(tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `booster_runtime.collectives.all_gather_object`."""
        self._agreement.check(Call.here("all_gather_object", None))
        return self.inner.all_gather_object(value)


def _lengths(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]


def _name_of(op: Any) -> str:
    return str(op.name if isinstance(op, dist.ReduceOp.RedOpType) else op)
