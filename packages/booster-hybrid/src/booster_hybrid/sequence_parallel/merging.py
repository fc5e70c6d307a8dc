"""The outputs of an attention, merged in fp32 from those of its blocks by the logarithms of their sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    _Place = tuple[slice, slice, slice]


class MergedOutputs:
    """What queries have found in the blocks so far.

    Args:
        query: The queries, shape ``(batch, heads, queries, size)``.
        value_size: Size of the outputs.
    """

    def __init__(self, query: Tensor, value_size: int) -> None:
        self._query, self._value_size = query, value_size
        self._format = sum_format(query)
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, rows: _Place, outputs: Tensor, logarithms: Tensor) -> None:
        """Merge what some of the queries have found in a block; may take the tensors over.

        Args:
            rows: Which of the queries.
            outputs: Shape ``(batch, heads, queries, value size)``.
            logarithms: Of the sums of exponentials, shape ``(batch, heads, queries)``.
        """
        outputs, logarithms = outputs.to(self._format), logarithms.to(self._format)
        if self._found is None and outputs.shape[:-1] == self._query.shape[:-1]:
            self._found = outputs, logarithms
            return
        merged, total = self._whole()
        merged, total = merged[rows], total[rows]
        # A sigmoid of the difference is the block's share of the weights; of two that saw nothing, none.
        share = (logarithms - total).sigmoid_().nan_to_num_(0.0)
        merged.lerp_(outputs, share.unsqueeze(-1))
        torch.logaddexp(total, logarithms, out=total)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs in the queries' format, and the logarithms of all sums, for backward.

        Args:
            sinks: Scores that take weight and have no value, shape ``(heads,)``; ``None`` for none.

        Returns:
            Zeros, and an infinite logarithm, for queries that have seen nothing: all weights are zero in backward.
        """
        merged, total = self._whole()
        if sinks is not None:
            sink = sinks.to(self._format).view(1, -1, 1)
            merged = merged * (total - sink).sigmoid().unsqueeze(-1)
            total = torch.logaddexp(total, sink)
        return merged.to(self._query.dtype), total.masked_fill(total == -math.inf, math.inf)

    def _whole(self) -> tuple[Tensor, Tensor]:
        if self._found is None:
            shape = self._query.shape[:-1]
            zeros = self._query.new_zeros(*shape, self._value_size, dtype=self._format)
            self._found = zeros, self._query.new_full(shape, -math.inf, dtype=self._format)
        return self._found


def sum_format(tensor: Tensor) -> torch.dtype:
    """Return the format in which what is added up of a tensor is kept: fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def sink_gradient(sinks: Tensor, gradient: Tensor, outputs: Tensor, logarithms: Tensor) -> Tensor:
    """Return the gradient of scores that take weight and have no value.

    Args:
        sinks: The scores, shape ``(heads,)``.
        gradient: That of the outputs.
        outputs: What the queries have found.
        logarithms: Of the sums of all weights, the sinks' included.
    """
    shared = (gradient.to(logarithms.dtype) * outputs).sum(-1)
    weights = (sinks.to(logarithms.dtype).view(1, -1, 1) - logarithms).exp_()
    return weights.mul_(shared).sum((0, 2)).neg_().to(sinks.dtype)
