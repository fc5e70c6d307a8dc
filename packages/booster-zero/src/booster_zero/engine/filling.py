"""`Filling`: how far a bucket has come in the present round of reductions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Filling:
    """How far a bucket has come in the present round.

    Attributes:
        gradients: The gradients that have come, flat and in the format that travels, by parameter.
        taken: The parameters that none is awaited of any more.
        missing: Number of gradients that are awaited.
        is_started: Whether the bucket is being reduced.
    """

    gradients: dict[int, Tensor] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    missing: int = 0
    is_started: bool = False

    def leave_out(self, index: int) -> None:
        """Await no gradient of a trained parameter."""
        if index not in self.taken:
            self.taken.add(index)
            self.missing -= 1
