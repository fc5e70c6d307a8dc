"""Reductions of tensors from several ranks: in rank order, and in fp32 where the dtype is narrow.

A flat buffer may be stored in parts: offset in the buffer, and values. Of matrices most of whose rows are zero, as
gradients of embeddings are, zero rows are not sent: a batch of 256 tokens touches at most 256 rows of a vocabulary of
32,000. Each rank tells each other how many rows it sends, ahead of them, so that the receiver's memory is as long as
they are; no rank asks or answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.precision import NARROW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Term = tuple[Tensor, Tensor] | Tensor
    """What a rank adds: numbers of rows and these rows, or a slice of the flattened matrix."""

SUMMED = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
COMBINED = (*SUMMED, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


def sum_into(out: Tensor, parts: Sequence[Tensor], *, scale: float, accumulate: bool) -> None:
    """Write or add ``scale`` times the sum of the parts, added in their order.

    Args:
        out: Receives the sum. If its dtype is narrow, the sum is computed in fp32 and rounded once. May be one of the
            parts, unless ``accumulate`` is set.
        parts: The terms, of ``out``'s shape and of one dtype. Only one that is ``out`` is written.
        scale: Multiplies the sum.
        accumulate: Add to ``out`` instead of replacing it.
    """
    if out.dtype in NARROW:
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total.add_(part)
        if scale != 1.0:
            total.mul_(scale)
        if accumulate:
            total.add_(out)
        out.copy_(total)
        return
    if accumulate:
        for part in parts:
            out.add_(part, alpha=scale)
        return
    first, *later = parts
    if later and first.dtype == out.dtype:
        # The first two terms replace `out`, so a later term that is `out` is copied.
        later[1:] = [part.clone() if part.data_ptr() == out.data_ptr() else part for part in later[1:]]
        torch.add(first, later.pop(0), out=out)
    else:
        out.copy_(first)
    for part in later:
        out.add_(part)
    if scale != 1.0:
        out.mul_(scale)


def combine_into(out: Tensor, terms: Sequence[Tensor], op: Any) -> None:
    """Write the reduction of all ranks' terms, which is the same bits on whichever rank computes it.

    Args:
        out: Receives the result; may be one of the terms.
        terms: One tensor per rank, of ``out``'s shape and dtype.
        op: ``SUM``, ``AVG``, ``MAX`` or ``MIN``.
    """
    if op in SUMMED:
        sum_into(out, terms, scale=scale_of(op, len(terms)), accumulate=False)
        return
    total = terms[0].clone()
    for term in terms[1:]:
        torch.maximum(total, term, out=total) if op == dist.ReduceOp.MAX else torch.minimum(total, term, out=total)
    out.copy_(total)


def scale_of(op: Any, size: int) -> float:
    """Return the factor that turns a sum over ``size`` ranks into the result of ``op``."""
    return 1.0 / size if op == dist.ReduceOp.AVG else 1.0


def overlaps(parts: Sequence[tuple[int, Tensor]], low: int, high: int) -> list[tuple[int, Tensor]]:
    """Return the pieces of the parts that fall into a range of the buffer, each with its offset in the buffer.

    Args:
        parts: Offset in the buffer and values of each part.
        low: First element of the range.
        high: One past its last element.
    """
    found = []
    for offset, part in parts:
        start, stop = max(offset, low), min(offset + part.numel(), high)
        if start < stop:
            found.append((start, part[start - offset : stop - offset]))
    return found


_COUNT_TAG, _ROWS_TAG = 7011, 7012
"""Messages of one tag arrive in the order in which they were sent. The numbers of rows of several sums are received
before the rows of the first, so they have a tag of their own."""
_ALL_ROWS = -1
_MOST_TOUCHED = 0.25
"""Part of the rows above which all are sent: numbers of rows, and adding them up one by one, cost something, too."""
_ROWS_AT_ONCE = 1 << 12


def touched_rows(matrix: Tensor) -> Tensor | None:
    """Return the numbers of the rows that have an element other than zero, in order; ``None`` if those are many.

    Args:
        matrix: Shape ``(rows, width)``, contiguous.
    """
    itemsize = matrix.element_size()
    row_bytes = matrix.shape[1] * itemsize
    # As whole numbers, eight bytes at a time: reads are what this costs. A part of another tensor may begin in between.
    is_aligned = row_bytes % 8 == 0 and matrix.storage_offset() * itemsize % 8 == 0
    words = matrix.view(torch.int64) if is_aligned and itemsize < 8 else matrix
    found, count = [], 0
    for start in range(0, len(words), _ROWS_AT_ONCE):
        rows = words[start : start + _ROWS_AT_ONCE].any(dim=1).nonzero().view(-1)
        count += len(rows)
        if count > _MOST_TOUCHED * len(words):
            return None
        found.append(rows + start)
    return torch.cat(found) if found else None


def rows_within(matrix: Tensor, touched: Tensor | None, low: int, high: int) -> tuple[Tensor, Tensor] | None:
    """Return the numbers of the touched rows that a range of elements has any of, and these rows.

    Args:
        matrix: As above.
        touched: As `touched_rows` returned it.
        low: First element of the range in the flattened matrix.
        high: One past its last.

    Returns:
        ``None`` where all rows are to be sent.
    """
    if touched is None:
        return None
    first, last = low // matrix.shape[1], -(-high // matrix.shape[1])
    begin, end = torch.searchsorted(touched, torch.tensor([first, last])).tolist()
    chosen = touched[begin:end] if low < high else touched[:0]
    return chosen, matrix[chosen]


def sum_rows(
    out: Tensor, terms: Sequence[tuple[Tensor, Tensor]], width: int, low: int, *, scale: float, accumulate: bool
) -> None:
    """Write or add a scaled sum of matrices that are given by some of their rows; the same bits as of whole matrices.

    Args:
        out: Receives a range of the elements of the flattened sum.
        terms: Numbers of rows, in order, and these rows; one term for each rank, in rank order.
        width: Elements of a row.
        low: The first element of the range.
        scale: Multiplies the sum.
        accumulate: Add to ``out`` instead of replacing it.
    """
    if not accumulate:
        out.zero_()
    rows = torch.unique(torch.cat([numbers for numbers, _ in terms]))
    if not len(rows):
        return
    dense = []
    for numbers, values in terms:
        term = values.new_zeros(len(rows), width)
        term[torch.searchsorted(rows, numbers)] = values
        dense.append(term)
    elements = (rows.view(-1, 1) * width + torch.arange(width)).view(-1) - low
    inside = (elements >= 0) & (elements < out.numel())  # not all of the first and the last row
    is_whole = bool(inside.all())
    total = torch.zeros(len(rows) * width, dtype=out.dtype)
    if accumulate:
        total[inside] = out[elements[inside]]
    sum_into(total, [term.view(-1) for term in dense], scale=scale, accumulate=accumulate)
    out[elements if is_whole else elements[inside]] = total if is_whole else total[inside]


class RowExchange:
    """One sum of rows that is underway between ranks.

    Args:
        matrix: This rank's term, shape ``(rows, width)``, contiguous.
        bounds: Start and end of each rank's slice of the flattened matrix.
        rank: This rank.
        neighbours: Whom to receive from and send to, step by step.
        send: Starts sending a tensor to a rank, with a tag.
        receive: Starts receiving one from a rank.
    """

    def __init__(
        self,
        matrix: Tensor,
        bounds: Sequence[int],
        rank: int,
        neighbours: Sequence[tuple[int, int]],
        send: Callable[[Tensor, int, int], Any],
        receive: Callable[[Tensor, int, int], Any],
    ) -> None:
        self._matrix, self._bounds, self._rank = matrix, bounds, rank
        self._senders = [sender for sender, _ in neighbours]
        self._receive = receive
        touched = touched_rows(matrix)
        self._counts = torch.empty((len(neighbours) + 1, 1), dtype=torch.int64)
        self._told: list[Any] = []
        self._sent: list[Any] = []
        for sender, receiver in neighbours:
            self._told.append(receive(self._counts[sender], sender, _COUNT_TAG))
            term = self._term_for(receiver, touched)
            count = torch.tensor([_ALL_ROWS if isinstance(term, torch.Tensor) else len(term[0])])
            self._sent.append(send(count, receiver, _COUNT_TAG))
            for part in [term] if isinstance(term, torch.Tensor) else term:
                if part.numel():
                    self._sent.append(send(part, receiver, _ROWS_TAG))
        self._terms = {rank: self._term_for(rank, touched)}

    def _term_for(self, rank: int, touched: Tensor | None) -> Term:
        low, high = self._bounds[rank], self._bounds[rank + 1]
        return rows_within(self._matrix, touched, low, high) or self._matrix.view(-1)[low:high]

    def start_receiving(self) -> list[Any]:
        """Wait until it is known how much the others send, and return what to wait for then."""
        for work in self._told:
            work.wait()
        low, high = self._bounds[self._rank], self._bounds[self._rank + 1]
        works = self._sent
        for sender in self._senders:
            count = int(self._counts[sender])
            if count == _ALL_ROWS:
                parts: tuple[Tensor, ...] = (self._matrix.new_empty(high - low),)
                self._terms[sender] = parts[0]
            else:
                numbers = torch.empty(count, dtype=torch.int64)
                parts = (numbers, self._matrix.new_empty(count, self._matrix.shape[1]))
                self._terms[sender] = (numbers, parts[1])
            works += [self._receive(part, sender, _ROWS_TAG) for part in parts if part.numel()]
        return works

    def add_up(self, out: Tensor, *, scale: float, accumulate: bool) -> None:
        """Write or add the scaled sum, once everything has come."""
        terms = [self._terms[rank] for rank in sorted(self._terms)]
        width, low = self._matrix.shape[1], self._bounds[self._rank]
        sparse = [term for term in terms if not isinstance(term, torch.Tensor)]
        if len(sparse) == len(terms):
            sum_rows(out, sparse, width, low, scale=scale, accumulate=accumulate)
            return
        dense = []
        for term in terms:
            whole = term if isinstance(term, torch.Tensor) else self._matrix.new_empty(out.numel())
            if not isinstance(term, torch.Tensor):
                sum_rows(whole, [term], width, low, scale=1.0, accumulate=False)
            dense.append(whole)
        sum_into(out, dense, scale=scale, accumulate=accumulate)
