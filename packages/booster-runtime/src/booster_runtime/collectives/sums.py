"""Reductions of tensors from several ranks: in rank order, and in fp32 where the dtype is narrow.

A flat buffer may be stored in parts: offset in the buffer, and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.precision import NARROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

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
