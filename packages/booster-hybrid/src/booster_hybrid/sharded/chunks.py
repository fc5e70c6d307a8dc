"""`Chunks`: a `ChunkManager` that answers what code of the other stages asks about gathers after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_zero.gathering import ChunkManager

if TYPE_CHECKING:
    from booster_zero.engine import Layout


class Chunks(ChunkManager):
    """The chunks of a model, none of which is gathered by a step.

    Attributes:
        is_underway: Whether updated parameters are still being gathered.
    """

    is_underway = False

    def wait(self) -> None:
        """Return once updated parameters are here, which is at once: their next use gathers them."""

    def order_to_lay_out(self, order: list[int], layout: Layout) -> None:
        """Keep the layout, in which a layer has chunks of its own."""
        del order, layout
        self.first_uses = None
