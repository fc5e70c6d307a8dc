"""What a transport offers: the functions of `booster_runtime.collectives`, bound to one process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_runtime.collectives.pending import Pending


class Transport(Protocol):
    """The collectives of one process group.

    Each method does what the function of its name in `booster_runtime.collectives` says, on every kind of device.
    """

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, scale: float, accumulate: bool
    ) -> Pending:
        """Start summing a flat buffer over ranks; each rank receives its slice."""

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
        """Start summing a flat buffer that is stored in parts on the CPU."""

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Pending:
        """Start filling a flat buffer with every rank's slice, in place."""

    def all_to_all(self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]) -> Pending:
        """Start exchanging slices of flat buffers between all ranks."""

    def all_reduce(self, tensor: Tensor, op: Any) -> Pending:
        """Start combining a tensor over ranks, in place."""

    def broadcast(self, tensor: Tensor) -> Pending:
        """Start copying the first rank's tensor to the others, in place."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's small Python object, in rank order."""
