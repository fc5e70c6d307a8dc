"""The transport of a group of one rank, which communicates with nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_runtime.collectives.flat import overlaps
from booster_runtime.collectives.pending import Pending
from booster_runtime.collectives.sums import sum_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class AloneTransport:
    """Computes each collective's result from this rank's tensors."""

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, scale: float, accumulate: bool
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter`."""
        own = source[bounds[0] : bounds[1]]
        return Pending(finish=lambda: sum_into(out, [own], scale=scale, accumulate=accumulate))

    def reduce_scatter_parts(
        self,
        parts: Sequence[tuple[int, Tensor]],
        bounds: Sequence[int],
        out: Tensor,
        *,
        scale: float,
        accumulate: bool,
        scratch: Tensor | None,  # noqa: ARG002 - nothing is received
    ) -> Pending:
        """See `booster_runtime.collectives.reduce_scatter_parts`."""
        own = overlaps(parts, bounds[0], bounds[1])

        def copy() -> None:
            for offset, part in own:
                start = offset - bounds[0]
                sum_into(out[start : start + part.numel()], [part], scale=scale, accumulate=accumulate)

        return Pending(finish=copy, keep=parts)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:  # noqa: ARG002 - nothing is missing
        """See `booster_runtime.collectives.all_gather`."""
        return Pending()

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """See `booster_runtime.collectives.all_to_all`."""
        out[received[0] : received[1]].copy_(source[sent[0] : sent[1]])
        return Pending()

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:  # noqa: ARG002 - the only term is the result
        """See `booster_runtime.collectives.all_reduce`."""
        return Pending()

    def broadcast(self, tensor: Tensor) -> Pending:  # noqa: ARG002 - the first rank is this one
        """See `booster_runtime.collectives.broadcast`."""
        return Pending()

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `booster_runtime.collectives.all_gather_object`."""
        return [value]
