"""`ShardedHybridOptimizer`: steps on slices of parameters that are sharded over the data parallel ranks, too."""

from __future__ import annotations

from typing import Any

from booster_hybrid.optimizer import HybridOptimizer
from booster_zero.gathering import GatheringOptimizer


class ShardedHybridOptimizer(GatheringOptimizer, HybridOptimizer):
    """`HybridOptimizer` for ``zero_stage=3``.

    Args:
        *args: As for `GatheringOptimizer`.
        waits_in_backward: Whether backward may wait for the reductions of other ranks: it may not if these also wait
            there for this one.
        **kwargs: As for `GatheringOptimizer`.
    """

    def __init__(self, *args: Any, waits_in_backward: bool, **kwargs: Any) -> None:
        self._waits_in_backward = waits_in_backward
        super().__init__(*args, **kwargs)
        self.reducer.waits_in_backward = False

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Agree on what the first round has shown; see `ZeroOptimizer.agree_on_record`.

        Collective: every rank that holds the same parameters.
        """
        found = super().agree_on_record(order, late)
        # A rank that waits for a reduction gathers nothing, which others may wait for before they start theirs.
        self.reducer.waits_in_backward = self._waits_in_backward and not self.reducer.unused_somewhere
        return found

    def lay_out_again(self, order: list[int]) -> None:
        """Keep the layout, in which a layer has chunks of its own."""
        del order
        self.reducer.set_buckets(self.reducer.buckets)  # drops the buffers of a round that waited for no reduction
