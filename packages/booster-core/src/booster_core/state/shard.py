"""`TensorShard`: which part of which tensor this rank holds, and where each of its elements is in the whole tensor.

Checkpoints, resharding, conversion, inspection, EMA and gradient access are all written once against
`TensorShard`. Everything rests on one fact: a range of a row-major flattened box is the union of at most
``2 * ndim - 1`` boxes that follow each other. So a shard of any kind (a tensor parallel box, a flat ZeRO range, a
chunk's piece) becomes a few boxes of the global tensor, and a box is copied by one strided copy, however many separate
runs of bytes it has. Pure functions of integers, except the views and copies at the end: no files, no process groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

Box = tuple[tuple[int, int], ...]
"""A half-open index range ``(start, stop)`` for each dimension of a tensor; ``()`` for a scalar."""


def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a whole tensor of the given shape."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of the part of a tensor that a box covers."""
    return tuple(stop - start for start, stop in box)


def box_numel(box: Box) -> int:
    """Return the number of elements that a box covers; 1 for the box of a scalar."""
    return math.prod(box_shape(box))


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """The part of one tensor of the user's model, or of its optimizer state, that this rank holds.

    A tensor may have several shards on one rank, as a fused q/k/v weight split over tensor parallel ranks has.

    Args:
        name: Fully qualified name as in the user's own model, before wrapping, LoRA prefixes and tensor splits.
        global_shape: Shape of the whole tensor in the user's model.
        dtype: Element type of the tensor as it is stored and written; equals ``data.dtype``.
        box: The index range of the global tensor that this shard was cut from.
        flat: Half-open range of the box, flattened row-major, that is held here. The whole box when ``None``.
        data: The values held here: shape ``box_shape(box)`` when ``flat`` is ``None``, otherwise
            ``(flat[1] - flat[0],)``. Reading sees the present values, and ``copy_`` into it changes the state.
        is_owner: Whether this rank writes this part. Of all replicas of a part, exactly one rank owns it.
        state: Name of the optimizer state, such as ``"exp_avg"`` or ``"master"``; ``None`` for the model's tensors.

    Raises:
        ConfigError: If the box does not fit the shape, the flat range does not fit the box, or the
            shape of ``data`` is not the one they say.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    data: torch.Tensor
    flat: tuple[int, int] | None = None
    is_owner: bool = True
    state: str | None = None

    def __post_init__(self) -> None:
        if len(self.box) != len(self.global_shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(self.box, self.global_shape, strict=True)
        ):
            msg = f"Box {self.box} of '{self.key}' does not fit into a tensor of shape {self.global_shape}."
            raise ConfigError(msg)
        if self.flat is None:
            expected = box_shape(self.box)
        else:
            start, stop = self.flat
            if not 0 <= start <= stop <= box_numel(self.box):
                numel = box_numel(self.box)
                msg = f"Flat range {self.flat} of '{self.key}' does not fit into its box of {numel} elements."
                raise ConfigError(msg)
            expected = (stop - start,)
        if tuple(self.data.shape) != expected:
            msg = f"The data of '{self.key}' has shape {tuple(self.data.shape)}; its box and flat range say {expected}."
            raise ConfigError(msg)
        if self.data.dtype != self.dtype:
            msg = f"The data of '{self.key}' has dtype {self.data.dtype}; the shard says {self.dtype}."
            raise ConfigError(msg)

    @property
    def key(self) -> str:
        """The tensor's name in a file: ``name`` for the model, ``name/state`` for the optimizer."""
        return self.name if self.state is None else f"{self.name}/{self.state}"

    @property
    def numel(self) -> int:
        """Number of elements held here."""
        return self.data.numel()

    @property
    def flat_range(self) -> tuple[int, int]:
        """The range of the flattened box held here, also where ``flat`` is the whole box."""
        return (0, box_numel(self.box)) if self.flat is None else self.flat


@dataclass(frozen=True)
class Region:
    """A box of the global tensor whose elements are consecutive in a shard's flattened values.

    Args:
        box: Index range of the global tensor.
        start: Position of the box' first element among the shard's values, in elements.
    """

    box: Box
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return box_numel(self.box)


def regions_of(box: Box, flat: tuple[int, int] | None = None) -> list[Region]:
    """Cut a flat range of a box into boxes, in the order of the range.

    Args:
        box: Index range of the global tensor.
        flat: Half-open range of the row-major flattened box; the whole box when ``None``.

    Returns:
        At most ``2 * len(box) - 1`` non-empty regions; their ``start`` counts from the beginning of the range.
    """
    numel = box_numel(box)
    start, stop = (0, numel) if flat is None else flat
    if (start, stop) == (0, numel) and numel:
        return [Region(box, 0)]
    return [Region(part, first - start) for first, part in _cut(box, start, stop, 0)]


def _cut(box: Box, start: int, stop: int, shift: int) -> Iterator[tuple[int, Box]]:
    """Yield (first flat index, box) for a part ``[start, stop)`` of a box whose elements are counted from shift."""
    if start >= stop:
        return
    (low, high), inner = box[0], box[1:]
    row = box_numel(inner)
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # the range is inside of one row
        index = last_whole
        head = ((low + index, low + index + 1),)
        for first, part in _cut(inner, start - index * row, stop - index * row, shift + index * row):
            yield first, head + part
        return
    if start < first_whole * row:
        index = first_whole - 1
        head = ((low + index, low + index + 1),)
        for first, part in _cut(inner, start - index * row, row, shift + index * row):
            yield first, head + part
    if first_whole < last_whole:
        yield shift + first_whole * row, ((low + first_whole, low + last_whole), *inner)
    if last_whole * row < stop:
        index = last_whole
        assert low + index < high, "the range ends within the box"
        head = ((low + index, low + index + 1),)
        for first, part in _cut(inner, 0, stop - index * row, shift + index * row):
            yield first, head + part


def span_of(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the smallest range of the row-major flattened tensor that contains a box; ``(0, 0)`` for an empty box."""
    if box_numel(box) == 0:
        return 0, 0
    first = last = 0
    for size, (start, stop) in zip(shape, box, strict=True):
        first = first * size + start
        last = last * size + stop - 1
    return first, last + 1


def is_contiguous(shape: tuple[int, ...], box: Box) -> bool:
    """Whether a box' elements follow each other without a gap in the row-major flattened tensor."""
    start, stop = span_of(shape, box)
    return stop - start == box_numel(box)


def runs_of(shape: tuple[int, ...], box: Box) -> tuple[Iterator[int], int]:
    """Return where the contiguous runs of a non-empty box start in the flattened tensor, and their common length.

    Runs that touch are joined, so a contiguous box is one run: one write.
    """
    length, dim = 1, len(shape)
    while dim > 0:
        dim -= 1
        start, stop = box[dim]
        length *= stop - start
        if stop - start != shape[dim]:
            break
    outer_strides = [math.prod(shape[index + 1 :]) for index in range(dim)]
    base = span_of(shape, box)[0]
    return _walk(base, [stop - start for start, stop in box[:dim]], outer_strides), length


def _walk(base: int, counts: list[int], strides: list[int]) -> Iterator[int]:
    if not counts:
        yield base
        return
    for index in range(counts[0]):
        yield from _walk(base + index * strides[0], counts[1:], strides[1:])


def slices_of(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Return a box as slices for indexing; relative to the box ``origin`` where one is given."""
    if origin is None:
        return tuple(slice(start, stop) for start, stop in box)
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, origin, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share, or ``None`` where they share no element."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as ``torch.uint8``, without a copy.

    A tensor of one element counts as contiguous whatever its strides are (0, where it was expanded).
    """
    flat = tensor.detach().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    return byte_view(tensor).numpy().data


def pack(data: torch.Tensor, start: int, stop: int, out: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy the row-major flattened elements ``[start, stop)`` of a tensor of any strides into ``out``.

    Args:
        data: Any shape, strides, dtype and device; at most ``stop - start`` of its elements are read.
        start: First element, counted row-major.
        stop: One past the last element.
        out: Contiguous, shape ``(stop - start,)``; any dtype and device, values are converted.
        non_blocking: Return before copies between devices have ended, as ``copy_`` does.
    """
    if data.is_contiguous():
        out.copy_(data.view(-1)[start:stop], non_blocking=non_blocking)
        return
    for region in regions_of(full_box(tuple(data.shape)), (start, stop)):
        target = out[region.start : region.start + region.numel]
        target.view(box_shape(region.box)).copy_(data[slices_of(region.box)], non_blocking=non_blocking)


def unpack(source: torch.Tensor, data: torch.Tensor, start: int, stop: int, *, non_blocking: bool = False) -> None:
    """Copy ``source`` into the row-major flattened elements ``[start, stop)`` of ``data``: the inverse of `pack`."""
    for region in regions_of(full_box(tuple(data.shape)), (start, stop)):
        values = source[region.start : region.start + region.numel].view(box_shape(region.box))
        data[slices_of(region.box)].copy_(values, non_blocking=non_blocking)


def copy_part(values: torch.Tensor, shard: TensorShard) -> None:
    """Copy a shard's part of a whole tensor, of any strides, dtype and device, into the shard."""
    part, data = values[slices_of(shard.box)], shard.data.detach()
    if shard.flat is None:
        data.copy_(part)
    else:
        pack(part, *shard.flat, data)


def copy_to_whole(shard: TensorShard, whole: torch.Tensor) -> None:
    """Copy a shard into its part of a whole tensor, of any strides, dtype and device: the inverse of `copy_part`."""
    values = shard.data.detach().reshape(-1)
    for region in regions_of(shard.box, shard.flat_range):
        part = values[region.start : region.start + region.numel]
        whole[slices_of(region.box)].copy_(part.view(box_shape(region.box)))
