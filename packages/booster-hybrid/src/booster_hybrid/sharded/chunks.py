"""`Chunks`: a `ChunkManager` that answers what code of the other stages asks about gathers after a step."""

from __future__ import annotations

from booster_zero.gathering import ChunkManager


class Chunks(ChunkManager):
    """The chunks of a model, none of which is gathered by a step.

    Attributes:
        is_underway: Whether updated parameters are still being gathered.
    """

    is_underway = False

    def wait(self) -> None:
        """Return once updated parameters are here, which is at once: their next use gathers them."""
