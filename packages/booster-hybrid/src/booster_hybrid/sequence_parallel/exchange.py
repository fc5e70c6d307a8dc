"""Which rank has which positions of a sequence, and differentiable collectives, each with its exact transpose.

Any length is split without padding: the first ranks have a position more. Under a causal mask late positions look at
more than early ones do, so ring attention cuts a sequence into twice as many chunks as there are ranks, and a rank
takes one from either end (zigzag placement): every rank then has as much to do as any other::

    4 ranks, contiguous      0 0 1 1 2 2 3 3
    4 ranks, zigzag          0 1 2 3 3 2 1 0

Every rank of the sequence axis computes a loss, and what is trained is their mean: gradients are averaged over data and
sequence parallel ranks alike. With exact transposes that holds whatever a rank does with whole outputs: where all ranks
compute the same loss, the sum over ranks that a transpose takes and the mean over ranks cancel each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from booster_hybrid.pipeline.absent import is_absent
from booster_hybrid.tensor_parallel.split import cut_units

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup

    _Operation = Callable[[Tensor, Any, RankGroup], Tensor]
    """Given a tensor, how it is split, and the ranks."""


@dataclass(frozen=True)
class SequenceLayout:
    """How the positions of sequences of one length are split.

    Args:
        length: Number of positions; where it is less than there are ranks, some have none.
        size: Number of ranks.
        zigzag: Give each rank a chunk from either end.
    """

    length: int
    size: int
    zigzag: bool = False

    @cached_property
    def ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank the half-open ranges of its positions, in increasing order."""
        if not self.zigzag:
            return tuple((span,) for span in cut_units(self.length, self.size))
        chunks = cut_units(self.length, 2 * self.size)
        return tuple((chunks[rank], chunks[2 * self.size - 1 - rank]) for rank in range(self.size))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.ranges)

    def take(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's part of a tensor.

        Args:
            whole: Any tensor whose dimension ``dim`` is the sequence.
            dim: That dimension.
            rank: The rank.

        Returns:
            A view where the part is in one piece, else a copy.
        """
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def put_together(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor of which each rank has a part; the inverse of `take`.

        Args:
            parts: Each rank's part.
            dim: The sequence's dimension.
        """
        pieces = []
        for part, spans in zip(parts, self.ranges, strict=True):
            position = 0
            for start, stop in spans:
                pieces.append((start, part.narrow(dim, position, stop - start)))
                position += stop - start
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in pieces], dim)


class _Paired(torch.autograd.Function):
    """One of the operations below in forward, and the one that undoes or transposes it in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, how: Any, group: RankGroup, operation: _Operation, back: _Operation
    ) -> Tensor:
        ctx.how, ctx.group, ctx.back = how, group, back
        return operation(tensor, how, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(gradient, ctx.how, ctx.group), None, None, None, None


def exchange(parts: Sequence[Tensor], received: Sequence[int], group: RankGroup) -> list[Tensor]:
    """Send each rank a tensor, and return what every rank has sent to this one.

    Args:
        parts: 1-D, for each rank; all of one dtype.
        received: Length of what comes from each rank.
        group: The ranks.

    Collective: the group, also in backward.
    """
    sent_bounds = [0, *accumulate(part.numel() for part in parts)]
    received_bounds = [0, *accumulate(received)]
    flat: Tensor = _Paired.apply(  # type: ignore[no-untyped-call]
        torch.cat(list(parts)), (sent_bounds, received_bounds), group, _sent, _sent_back
    )
    return list(torch.split(flat, list(received)))


def gather_sequence(local: Tensor, layout: SequenceLayout, group: RankGroup) -> Tensor:
    """Return the whole sequences of which each rank has a part.

    Args:
        local: Shape ``(batch, local positions, ...)``.
        layout: How they are split.
        group: The ranks.

    Returns:
        Shape ``(batch, positions, ...)``, positions in their own order.

    Collective: the group, also in backward.
    """
    if is_absent(local):
        return _whole_elsewhere(local, layout)
    result: Tensor = _Paired.apply(local, layout, group, gathered, reduce_scattered)  # type: ignore[no-untyped-call]
    return result


def scatter_sum(partial: Tensor, layout: SequenceLayout, group: RankGroup) -> Tensor:
    """Return this rank's part of the sum over ranks of whole sequences; the transpose of `gather_sequence`.

    Args:
        partial: Shape ``(batch, positions, ...)``.
        layout: How they are split.
        group: The ranks.

    Collective: the group, also in backward.
    """
    if is_absent(partial):
        return _taken(partial, layout, group)
    result: Tensor = _Paired.apply(partial, layout, group, reduce_scattered, gathered)  # type: ignore[no-untyped-call]
    return result


def join_replicas(local: Tensor, layout: SequenceLayout, group: RankGroup) -> Tensor:
    """Return whole sequences for ranks that go on alike, so that each has their whole gradient; see `gather_sequence`.

    Collective: the group.
    """
    if is_absent(local):
        return _whole_elsewhere(local, layout)
    result: Tensor = _Paired.apply(local, layout, group, gathered, _taken)  # type: ignore[no-untyped-call]
    return result


def cut_replica(whole: Tensor, layout: SequenceLayout, group: RankGroup) -> Tensor:
    """Return this rank's part of what every rank has computed alike; each gets the whole gradient back.

    Collective: the group, in backward.
    """
    result: Tensor = _Paired.apply(whole, layout, group, _taken, gathered)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of a tensor, whose gradient is the sum over ranks of its gradients.

    Collective: the group, also in backward.
    """
    result: Tensor = _Paired.apply(tensor, None, group, _summed, _summed)  # type: ignore[no-untyped-call]
    return result


def gathered(local: Tensor, layout: SequenceLayout, group: RankGroup) -> Tensor:
    """Return the whole sequences, outside of autograd; see `gather_sequence`.

    Collective: the group.
    """
    return begin_gather(local, layout, group)()


def begin_gather(local: Tensor, layout: SequenceLayout, group: RankGroup) -> Callable[[], Tensor]:
    """Begin to gather whole sequences, and return what waits for them; see `gathered`.

    Collective: the group.
    """
    bounds, shapes = _parts(local.shape, layout)
    buffer = local.new_empty(bounds[-1])
    buffer[bounds[group.rank] : bounds[group.rank + 1]].view(shapes[group.rank]).copy_(local)
    pending = group.all_gather(buffer, bounds)

    def wait() -> Tensor:
        pending.wait()
        parts = [buffer[bounds[rank] : bounds[rank + 1]].view(shape) for rank, shape in enumerate(shapes)]
        return layout.put_together(parts, 1)

    return wait


def reduce_scattered(whole: Tensor, layout: SequenceLayout, group: RankGroup) -> Tensor:
    """Return this rank's part of the sum over ranks of whole sequences, outside of autograd.

    Args:
        whole: Shape ``(batch, positions, ...)``.
        layout: How sequences are split.
        group: The ranks.

    Collective: the group.
    """
    bounds, shapes = _parts(whole.shape, layout)
    source = whole.new_empty(bounds[-1])
    for rank, shape in enumerate(shapes):
        source[bounds[rank] : bounds[rank + 1]].view(shape).copy_(layout.take(whole, 1, rank))
    own = whole.new_empty(shapes[group.rank])
    group.reduce_scatter(source, bounds, own.view(-1)).wait()
    return own


def _whole_elsewhere(local: Tensor, layout: SequenceLayout) -> Tensor:
    """Return whole sequences of which another pipeline stage has the values, as this one has none."""
    return local[:, :1].expand(-1, layout.length, *local.shape[2:])


def _taken(whole: Tensor, layout: SequenceLayout, group: RankGroup) -> Tensor:
    return layout.take(whole, 1, group.rank).contiguous()


def _parts(shape: Sequence[int], layout: SequenceLayout) -> tuple[list[int], list[torch.Size]]:
    """Return the bounds of each rank's part in a flat buffer, and its shape."""
    shapes = [torch.Size((shape[0], length, *shape[2:])) for length in layout.lengths]
    return [0, *accumulate(each.numel() for each in shapes)], shapes


def _sent(source: Tensor, bounds: tuple[Sequence[int], Sequence[int]], group: RankGroup) -> Tensor:
    sent, received = bounds
    out = source.new_empty(received[-1])
    group.all_to_all(source.contiguous(), sent, out, received).wait()
    return out


def _sent_back(gradient: Tensor, bounds: tuple[Sequence[int], Sequence[int]], group: RankGroup) -> Tensor:
    return _sent(gradient, bounds[::-1], group)


def _summed(tensor: Tensor, _: None, group: RankGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total).wait()
    return total
