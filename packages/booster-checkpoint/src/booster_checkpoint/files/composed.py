"""Tensors that are made of boxes of other tensors: experts that are stored one by one and held as one tensor.

A `Layout` says of which boxes. It is stacked, concatenated and cut like the tensor itself, by arithmetic on index
ranges, and any box of it is read from just the parts of the stored tensors that it covers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.tensor_file import read_whole
from booster_core.errors import CheckpointError
from booster_core.state import (
    TensorMeta,
    box_numel,
    box_shape,
    decode_extra_state,
    full_box,
    intersect,
    slices_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from booster_checkpoint.load.source import Source
    from booster_core.state import Box

_PART_BYTES = 16 << 20
"""How much is read at a time, where a part's values are not next to each other in memory."""


@dataclass(frozen=True)
class Piece:
    """A box of a stored tensor, and where it is in the composed one, perhaps with its dimensions in another order.

    Args:
        key: The stored tensor.
        box: Index range of the composed tensor.
        dims: For each dimension of the stored tensor, that of the composed one; ``None`` where it is a single index.
        origin: The first index in each dimension of the stored tensor.
    """

    key: str
    box: Box
    dims: tuple[int | None, ...]
    origin: tuple[int, ...]

    def stored(self, part: Box) -> Box:
        """Return the index range of the stored tensor that a part of `box` is."""
        ranges = []
        for dim, first in zip(self.dims, self.origin, strict=True):
            start, stop = (0, 1) if dim is None else (edge - self.box[dim][0] for edge in part[dim])
            ranges.append((first + start, first + stop))
        return tuple(ranges)

    def composed(self, part: Box) -> Box:
        """Return the index range of the composed tensor that a part of the stored box is: the inverse of `stored`."""
        ranges = list(self.box)
        for (start, stop), dim, first in zip(part, self.dims, self.origin, strict=True):
            if dim is not None:
                base = self.box[dim][0]
                ranges[dim] = (start - first + base, stop - first + base)
        return tuple(ranges)

    @property
    def is_ordered(self) -> bool:
        """Whether elements have the same order in both tensors."""
        order = [dim for dim in self.dims if dim is not None]
        return order == sorted(order)

    def arranged(self, values: torch.Tensor, part: Box) -> torch.Tensor:
        """Return values of a stored box in the shape of the part of the composed tensor that it is, without a copy."""
        dims = [dim for dim in self.dims if dim is not None]
        kept = values.view([size for size, dim in zip(values.shape, self.dims, strict=True) if dim is not None])
        kept = kept.permute(sorted(range(len(dims)), key=dims.__getitem__))
        for dim in range(len(part)):  # those that the stored tensor lacks have the size 1
            kept = kept if dim in dims else kept.unsqueeze(dim)
        return kept


@dataclass(frozen=True)
class Layout:
    """What a tensor is made of.

    Args:
        meta: Its shape and dtype.
        pieces: Its parts, which cover it once.
    """

    meta: TensorMeta
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, key: str, meta: TensorMeta) -> Layout:
        """Return the layout of a stored tensor as it is."""
        ndim = len(meta.shape)
        return cls(meta, (Piece(key, full_box(meta.shape), tuple(range(ndim)), (0,) * ndim),))

    @property
    def single(self) -> str | None:
        """The stored tensor, where this is just that as a whole."""
        piece = self.pieces[0] if len(self.pieces) == 1 else None
        in_order = tuple(range(len(self.meta.shape)))
        is_whole = piece is not None and piece.dims == in_order and not any(piece.origin)
        return piece.key if piece is not None and is_whole else None

    def cut(self, dim: int, start: int, stop: int) -> Layout:
        """Return what ``tensor.narrow(dim, start, stop - start)`` is made of."""
        window = tuple(
            (start, stop) if index == dim else edges for index, edges in enumerate(full_box(self.meta.shape))
        )
        pieces = []
        for piece in self.pieces:
            common = intersect(piece.box, window)
            if common is not None:
                origin = tuple(first for first, _ in piece.stored(common))
                box = _with(common, dim, tuple(edge - start for edge in common[dim]))
                pieces.append(replace(piece, box=box, origin=origin))
        shape = box_shape(window)
        return Layout(replace(self.meta, shape=shape), tuple(pieces))

    def transpose(self, dim0: int, dim1: int) -> Layout:
        """Return what ``tensor.transpose(dim0, dim1)`` is made of."""
        order = list(range(len(self.meta.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        pieces = [
            replace(
                piece,
                box=tuple(piece.box[dim] for dim in order),
                dims=tuple(None if dim is None else order.index(dim) for dim in piece.dims),
            )
            for piece in self.pieces
        ]
        shape = tuple(self.meta.shape[dim] for dim in order)
        return Layout(replace(self.meta, shape=shape), tuple(pieces))

    def select(self, dim: int, index: int) -> Layout:
        """Return what ``tensor.select(dim, index)`` is made of."""
        cut = self.cut(dim, index, index + 1)
        pieces = [
            replace(
                piece,
                box=piece.box[:dim] + piece.box[dim + 1 :],
                dims=tuple(None if at == dim else at if at is None or at < dim else at - 1 for at in piece.dims),
            )
            for piece in cut.pieces
        ]
        shape = cut.meta.shape
        return Layout(replace(cut.meta, shape=shape[:dim] + shape[dim + 1 :]), tuple(pieces))


def concatenate(layouts: Sequence[Layout], dim: int) -> Layout:
    """Return what ``torch.cat(tensors, dim)`` is made of.

    Raises:
        CheckpointError: If the tensors don't fit together.
    """
    first = layouts[0].meta
    rest = [_with(layout.meta.shape, dim, 0) for layout in layouts]
    _check_alike(layouts, rest)
    offset, pieces = 0, []
    for layout in layouts:
        for piece in layout.pieces:
            box = _with(piece.box, dim, tuple(edge + offset for edge in piece.box[dim]))
            pieces.append(replace(piece, box=box))
        offset += layout.meta.shape[dim]
    return Layout(replace(first, shape=_with(first.shape, dim, offset)), tuple(pieces))


def stack(layouts: Sequence[Layout], dim: int) -> Layout:
    """Return what ``torch.stack(tensors, dim)`` is made of.

    Raises:
        CheckpointError: If the tensors don't fit together.
    """
    first = layouts[0].meta
    _check_alike(layouts, [layout.meta.shape for layout in layouts])
    pieces = [
        replace(
            piece,
            box=(*piece.box[:dim], (index, index + 1), *piece.box[dim:]),
            dims=tuple(at if at is None or at < dim else at + 1 for at in piece.dims),
        )
        for index, layout in enumerate(layouts)
        for piece in layout.pieces
    ]
    shape = (*first.shape[:dim], len(layouts), *first.shape[dim:])
    return Layout(replace(first, shape=shape), tuple(pieces))


def chunks(layout: Layout, count: int, dim: int) -> list[Layout]:
    """Return what the tensors of ``torch.chunk(tensor, count, dim)`` are made of."""
    size = layout.meta.shape[dim]
    step = max(-(-size // count), 1)
    return [layout.cut(dim, start, min(start + step, size)) for start in range(0, size, step)]


class ComposedTensors:
    """A checkpoint's tensors and values under other names, some of them made of several.

    Args:
        source: The open checkpoint.
        layouts: What each tensor is made of, by its name here.
        values: For each of the checkpoint's values, its name here, and that in the checkpoint.
    """

    def __init__(self, source: Source, layouts: Mapping[str, Layout], values: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.layouts = layouts
        self.tensors = {name: layout.meta for name, layout in layouts.items()}
        self.names = {name: name for name in source.values} if values is None else values
        self.values: dict[str, Any] = {name: source.values[key] for name, key in self.names.items()}

    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Read a box of a tensor; see `booster_checkpoint.files.tensor_file.TensorFile.read`."""
        layout = self.layouts[key]
        if layout.single is not None:
            self.source.read(layout.single, box, out)
            return
        target = out.view(box_shape(box))
        for piece in layout.pieces:
            common = intersect(box, piece.box)
            if common is None:
                continue
            if piece.is_ordered and target[slices_of(common, box)].is_contiguous():
                self.source.read(piece.key, piece.stored(common), target[slices_of(common, box)].view(-1))
                continue
            for stored in rows_of(piece.stored(common), out.dtype.itemsize):
                values, part = out.new_empty(box_numel(stored)), piece.composed(stored)
                self.source.read(piece.key, stored, values)
                target[slices_of(part, box)] = piece.arranged(values.view(box_shape(stored)), part)

    def read_whole(self, key: str) -> torch.Tensor:
        """Return all of a tensor."""
        return read_whole(self.tensors[key], lambda box, out: self.read(key, box, out))

    def extra_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the extra state of modules, decoded, as far as it is there; see `Source.extra_values`."""
        return decode_extra_state(names, self.values, self.tensors, self.read_whole, self.source.read_whole)


def rows_of(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box, along as few of its first dimensions as possible, into parts of a limited size."""
    lead = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), 0)
    (start, stop), rest = box[lead], box[lead + 1 :]
    step = _PART_BYTES // max(box_numel(rest) * itemsize, 1)
    for first in range(start, stop, max(step, 1)):
        part = (*box[:lead], (first, min(first + max(step, 1), stop)), *rest)
        yield from (part,) if step else rows_of(part, itemsize)


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _check_alike(layouts: Sequence[Layout], shapes: Sequence[tuple[int, ...]]) -> None:
    kinds = {(shape, layout.meta.dtype) for shape, layout in zip(shapes, layouts, strict=True)}
    if len(kinds) > 1:
        a, b = layouts[0], next(layout for layout in layouts if layout.meta != layouts[0].meta)
        msg = (
            f"'{a.pieces[0].key}' ({a.meta.shape}, {a.meta.dtype}) and '{b.pieces[0].key}' ({b.meta.shape}, "
            f"{b.meta.dtype}) make up one tensor of the model, and don't fit together."
        )
        raise CheckpointError(msg)
