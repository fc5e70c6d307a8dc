"""A tensor that lies in parts, which are in several places: whether they are all of it, and reading a box of it."""

from __future__ import annotations

import itertools
import math
import struct
from typing import TYPE_CHECKING

import torch

from booster_core.state import Box, box_numel, box_shape, intersect, regions_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_BYTES = 16 << 20
"""How much is read into memory of its own at a time."""
MOST_DIMS = 64
"""Torch's and numpy's own limit."""


def is_tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether boxes fill a tensor, and none of them overlap.

    Each element is in an odd number of boxes exactly if the corners that an odd number of boxes have are those of the
    tensor. If the boxes also have as many elements together as the tensor has, then that number is one.

    Args:
        shape: The tensor's shape.
        boxes: Parts of it, none of which leaves it.
    """
    boxes = [box for box in boxes if box_numel(box)]
    if sum(map(box_numel, boxes)) != math.prod(shape):
        return False
    if len(boxes) < 2:
        return True
    dims = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in boxes)]
    if len(boxes) * (1 + len(dims)) < 1 << len(dims):
        return all(intersect(one, other) is None for one, other in itertools.combinations(boxes, 2))
    odd: set[bytes] = set()
    for box in boxes:
        odd ^= set(_corners([box[dim] for dim in dims]))
    return odd == set(_corners([(0, shape[dim]) for dim in dims]))


def _corners(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return a box' corners. As bytes, whose hashes a file can't foresee, as it can those of numbers."""
    return [struct.pack(f"<{len(ranges)}q", *corner) for corner in itertools.product(*ranges)]


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
