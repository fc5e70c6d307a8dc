"""Vocabulary-parallel embedding: each rank looks up the tokens whose rows it holds, and the results are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_hybrid.tensor_parallel.bounds import within_bounds
from booster_hybrid.tensor_parallel.collectives import leave

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from booster_hybrid.rank_group import RankGroup


class VocabularyForward:
    """The forward of an embedding that holds some rows.

    The embedding's own forward still runs, so that one which scales its results, as Gemma's does, keeps doing so.

    A token that is in nobody's rows raises, as it does in one process.

    Args:
        module: The embedding, with its local rows and its padding index among these.
        first: Index of the first local row in the whole table.
        num_rows: Rows of the whole table.
        group: The tensor parallel ranks.
    """

    def __init__(self, module: nn.Embedding, first: int, num_rows: int, group: RankGroup) -> None:
        self._module, self._first, self._num_rows, self._group = module, first, num_rows, group
        self._forward = module.forward

    def __call__(self, tokens: Tensor) -> Tensor:
        tokens = within_bounds(tokens, self._num_rows, "Token")
        return looked_up(tokens, self._first, self._module.num_embeddings, self._forward, self._group)


def looked_up(
    tokens: Tensor, first: int, num_rows: int, function: Callable[[Tensor], Tensor], group: RankGroup
) -> Tensor:
    """Return the rows of tokens, of which each rank has some.

    Args:
        tokens: Indices of the whole table, in any shape.
        first: Index of the first local row.
        num_rows: Number of local rows.
        function: Looks up local indices.
        group: The tensor parallel ranks.

    Collective: the group.
    """
    local = tokens - first
    is_elsewhere = (local < 0) | (local >= num_rows)
    rows = function(local.masked_fill(is_elsewhere, 0))
    return leave(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), group)
