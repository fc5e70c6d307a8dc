"""Putting together a box of a tensor that lies in parts, which are in several places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_core.state import Box, box_numel, box_shape, intersect, regions_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_BYTES = 16 << 20
"""How much is read into memory of its own at a time."""


def read_common(
    read: Callable[[Box, torch.Tensor], None], part: Box, box: Box, dtype: torch.dtype, out: torch.Tensor
) -> None:
    """Read what a box of a tensor has in common with a part of it, into its place among the box' values.

    Args:
        read: Fills a contiguous 1-D tensor with a box of the part, whose indices begin at the part's.
        part: Where the part is in the tensor; it has something in common with the box.
        box: What is asked for.
        dtype: The part's.
        out: The box' values, contiguous.
    """
    common = intersect(box, part)
    assert common is not None, "the caller has looked"
    target = out.view(box_shape(box))[slices_of(common, box)]
    if target.is_contiguous():
        read(_relative(common, part), target.view(-1))
        return
    most = max(_MOST_BYTES // dtype.itemsize, 1)
    for first in range(0, box_numel(common), most):
        for region in regions_of(common, (first, min(first + most, box_numel(common)))):
            values = torch.empty(region.numel, dtype=dtype)
            read(_relative(region.box, part), values)
            out.view(box_shape(box))[slices_of(region.box, box)] = values.view(box_shape(region.box))


def _relative(box: Box, origin: Box) -> Box:
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(box, origin, strict=True))
