"""Sums of what ranks have sent, in rank order, and in fp32 where the format is narrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_core.precision import NARROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK_NUMEL = 1 << 16
"""Sums are taken in blocks of this many elements, so that what follows the first pass finds them in the cache."""


def sum_into(out: Tensor, parts: Sequence[Tensor], *, scale: float, accumulate: bool) -> None:
    """Write or add ``scale`` times the sum of parts, taken in their order.

    Args:
        out: Receives the sum, any floating format.
        parts: The terms, of ``out``'s shape and of one format.
        scale: Multiplies the sum.
        accumulate: Add to ``out`` instead of replacing it.
    """
    if out.dtype in NARROW:
        total = parts[0].float()
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
    if len(parts) > 1 and all(part.dtype == out.dtype for part in parts[:2]):
        torch.add(parts[0], parts[1], out=out)
        rest = parts[2:]
    else:
        out.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        out.add_(part)
    if scale != 1.0:
        out.mul_(scale)
