"""Logits of which each rank has those of its positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_hybrid.sequence_parallel.exchange import gather_sequence
from booster_hybrid.split_logits import LogitsPartition, SplitLogits

if TYPE_CHECKING:
    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.sequence_parallel.layout import SequenceLayout


class ByPositions(LogitsPartition):
    """Logits of shape ``(batch, positions, vocabulary)`` of which each rank has some positions.

    Args:
        layout: Who has which.
        group: The sequence parallel ranks.
    """

    def __init__(self, layout: SequenceLayout, group: RankGroup) -> None:
        super().__init__(group)
        self._layout = layout

    def shape(self, local: torch.Size) -> torch.Size:
        """Return the shape of all logits, given that of a part."""
        first, _, *rest = local
        return torch.Size((first, self._layout.length, *rest))

    def gathered(self, local: Tensor) -> Tensor:
        """Return the logits of all positions, split by vocabulary still if the part is.

        Collective: the sequence parallel ranks.
        """
        if isinstance(local, SplitLogits):
            return local.alike(gather_sequence(local.local(), self._layout, self.group))
        return gather_sequence(local, self._layout, self.group)

    def shown(self) -> str:
        """Return what is here of what."""
        return f"logits of {self._layout.lengths[self.group.rank]} of {self._layout.length} positions"
