"""The loss of causal language models over logits of which each rank has those of its positions.

Labels are shifted before they are split, so that the last position of a part predicts the first of the next one. All
ranks know all labels, so that they agree on how many count without asking; one sum over ranks of a number is all that
travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_hybrid.sequence_parallel.exchange import sum_over_ranks
from booster_hybrid.tensor_parallel.bounds import within_bounds
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.sequence_parallel.layout import SequenceLayout


class SequenceLoss:
    """The loss of transformers' causal language models over this rank's positions, with its arguments.

    Args:
        layout_for: Returns how a sequence of a length is split.
        group: The sequence parallel ranks.
        is_split: Tells whether logits come split by positions; whole ones are split here.
    """

    def __init__(
        self, layout_for: Callable[[int], SequenceLayout], group: RankGroup, is_split: Callable[[], bool]
    ) -> None:
        self._layout_for, self._group, self._is_split = layout_for, group, is_split

    @outside_of_graphs
    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the mean over the counted tokens of whole sequences, or their sum over ``num_items_in_batch``.

        Args:
            logits: Shape ``(batch, local positions, vocabulary)``, or of all positions where they are not split.
            labels: Shape ``(batch, positions)``, for whole sequences.
            vocab_size: What transformers passes; the logits know it.
            num_items_in_batch: What to divide the sum by.
            ignore_index: Label of tokens that don't count.
            shift_labels: The labels in the places of the tokens that predict them, for whole sequences.

        Raises:
            IndexError: If a label that counts is no index of the vocabulary; see `within_bounds`.

        Collective: the sequence parallel ranks, and those of the split vocabulary.
        """
        del vocab_size
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]
        shift_labels = shift_labels.to(logits.device)
        # Before each rank takes its part: all raise, or none does.
        within_bounds(shift_labels.masked_fill(shift_labels == ignore_index, 0), logits.shape[-1], "Target")
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        layout = self._layout_for(shift_labels.shape[1])
        local = layout.take(shift_labels, 1, self._group.rank)
        if not self._is_split():
            logits = layout.take(logits, 1, self._group.rank)
        total = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), local.flatten(), ignore_index=ignore_index, reduction="sum"
        )
        count = count.to(total.device) if isinstance(count, torch.Tensor) else count
        return sum_over_ranks(total, self._group) / count
