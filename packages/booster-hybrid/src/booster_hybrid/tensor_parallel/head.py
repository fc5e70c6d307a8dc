"""The vocabulary of a split head, as `booster_runtime.linear_cross_entropy` asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_hybrid.tensor_parallel.bounds import within_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup


class HeadVocabulary:
    """How the ranks of a tensor parallel group share a vocabulary.

    Args:
        sizes: Length of each rank's part.
        group: The ranks.

    Attributes:
        size: Length of the whole vocabulary.
        first: Index of this rank's first logit in it.
        largest_size: Length of the longest part.
    """

    def __init__(self, sizes: Sequence[int], group: RankGroup) -> None:
        self.size, self._group = sum(sizes), group
        self.first, self.largest_size = sum(sizes[: group.rank]), max(sizes)

    def check(self, labels: Tensor) -> None:
        """Raise for labels outside of the whole vocabulary; see `within_bounds`."""
        within_bounds(labels, self.size, "Target")

    def gather(self, terms: Tensor) -> Tensor:
        """Return the ranks' terms, one after the other along a new first dimension.

        Collective: the group.
        """
        ranks = self._group.size
        of_ranks = terms.new_empty((ranks, *terms.shape))
        of_ranks[self._group.rank] = terms
        self._group.all_gather(of_ranks.view(-1), [rank * terms.numel() for rank in range(ranks + 1)]).wait()
        return of_ranks

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place.

        Collective: the group.
        """
        self._group.all_reduce(tensor).wait()
