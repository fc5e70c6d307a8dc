"""The collectives over a channel, as steps that run once the ranks that they need are there."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from booster_runtime.collectives.sums import combine_into, scale_of, sum_into
from booster_runtime.collectives.transports.direct.channel import SCRATCH_BYTES
from booster_runtime.collectives.transports.direct.signatures import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    describe,
    signature_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_runtime.collectives.transports.direct.channel import Channel
    from booster_runtime.collectives.transports.direct.peer import Peer

SMALL_BYTES = 1 << 15
"""Tensors up to this size are combined by every rank, larger ones slice by slice, one slice per rank."""

_UNEVEN = -1
"""In place of a number of bytes that differs from rank to rank."""


class Operation(ABC):
    """One collective, from its start until nobody reads its tensors any more.

    Args:
        sources: This rank's tensors that others read: contiguous, on the CPU; kept until the end.
        nbytes: Their size in bytes, the same on every rank.
        signature: Operation, reduction, dtype and splits, the same on every rank; see `signatures`.
    """

    def __init__(self, sources: Sequence[Tensor], nbytes: int, signature: int) -> None:
        self._sources = list(sources)
        self._nbytes, self._signature = nbytes, signature
        words = []
        for source in self._sources:
            words += [source.data_ptr(), source.numel() * source.element_size()]
        self._table = (ctypes.c_int64 * max(len(words), 2))(*words)
        self._tables: dict[int, int] = {}
        self._has_read = False
        self._waiting: list[Peer] = []
        self.has_ended = False

    def begin(self, channel: Channel, number: int) -> None:
        """Post the addresses of this rank's tensors."""
        self._channel, self._number = channel, number
        self._waiting = list(channel.peers)
        channel.post(number, ctypes.addressof(self._table), self._nbytes, self._signature)

    def wait(self) -> None:
        """Return once the result is there and the tensors may be changed.

        Collective: none; the collective was entered when it was started.
        """
        self._channel.wait(self)

    def waits_for(self) -> list[int]:
        """Return the ranks of the world that it waits for now."""
        return [peer.name for peer in self._waiting]

    def describe(self) -> str:
        """Return what it is, for messages."""
        return describe(self._signature, self._nbytes)

    def advance(self) -> bool:
        """Take the steps that are possible now, and return whether there was one."""
        if self.has_ended:
            return False
        moved = False
        if not self._has_read:
            if len(self._tables) < len(self._channel.peers):
                moved = self._meet()
                if len(self._tables) < len(self._channel.peers):
                    return moved
            if not self.read():
                return moved
            self._has_read = moved = True
            self._channel.post_done(self._number)
            self._waiting = list(self._channel.peers)
        before = len(self._waiting)
        self._waiting = [peer for peer in self._waiting if not self._channel.is_done(peer, self._number)]
        if not self._waiting:
            self.has_ended = True
            self._sources = []
        return moved or len(self._waiting) < before

    def _meet(self) -> bool:
        moved = False
        for peer in list(self._waiting):
            table = self._channel.table_of(peer, self._number, self._nbytes, self._signature)
            if table is not None:
                self._tables[peer.rank] = table
                self._waiting.remove(peer)
                moved = True
        return moved

    def address(self, peer: Peer, index: int = 0) -> int:
        """Return the address of a rank's tensor in its process."""
        return peer.entry(self._tables[peer.rank], index)[0]

    @abstractmethod
    def read(self) -> bool:
        """Read what this rank needs, once all ranks are there; return whether that is everything."""


class ReduceScatter(Operation):
    """Sums this rank's slice over every rank's parts.

    Args:
        parts: As for `booster_runtime.collectives.reduce_scatter_parts`.
        layout: Offsets of the parts, and of the slices; the same on every rank.
        own: For each part that overlaps this rank's slice: its index, the first element that does, and the range of
            ``out`` that it is summed into.
        out: This rank's slice of the sum.
        scale: Multiplies the sum.
        accumulate: Add to ``out``.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        layout: Sequence[int],
        own: Sequence[tuple[int, int, slice]],
        out: Tensor,
        *,
        scale: float,
        accumulate: bool,
    ) -> None:
        dtype = parts[0].dtype if parts else None
        lengths = [part.numel() for part in parts]
        super().__init__(
            parts,
            sum(lengths) * (dtype.itemsize if dtype else 1),
            signature_of(REDUCE_SCATTER, dtype, layout=[*layout, *lengths]),
        )
        self._own, self._out, self._scale, self._accumulate = own, out, scale, accumulate

    def read(self) -> bool:
        for index, first, target in self._own:
            mine = self._sources[index].view(-1)[first : first + target.stop - target.start]
            places = {
                peer.rank: self.address(peer, index) + first * mine.element_size() for peer in self._channel.peers
            }
            add_up(self._channel, mine, places, self._out[target], scale=self._scale, accumulate=self._accumulate)
        return True


class AllGather(Operation):
    """Fills a buffer with the slices of the others.

    Args:
        buffer: 1-D, contiguous; this rank's slice is read by the others.
        bounds: Start and end of each slice.
    """

    def __init__(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        super().__init__(
            [buffer], bounds[-1] * buffer.element_size(), signature_of(ALL_GATHER, buffer.dtype, layout=bounds)
        )
        self._bounds = bounds

    def read(self) -> bool:
        buffer = self._sources[0]
        for peer in self._channel.peers:
            low, high = self._bounds[peer.rank], self._bounds[peer.rank + 1]
            peer.read(self.address(peer) + low * buffer.element_size(), buffer[low:high])
        return True


class AllToAll(Operation):
    """Gives each rank the slices that the others have for it.

    Args:
        slices: This rank's slice for each rank of the group, each contiguous; lengths may differ.
        outs: Receives each rank's slice for this one.
    """

    def __init__(self, slices: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        super().__init__(slices, _UNEVEN, signature_of(ALL_TO_ALL, slices[0].dtype))
        self._outs = outs

    def read(self) -> bool:
        channel = self._channel
        for peer in channel.peers:
            out = self._outs[peer.rank]
            address, nbytes = peer.entry(self._tables[peer.rank], channel.rank)
            if nbytes != out.numel() * out.element_size():
                channel.fail(
                    self._number,
                    f"Rank {peer.name} sends {nbytes} bytes to rank {channel.name} by {self.describe()}, and rank "
                    f"{channel.name} expects {out.numel() * out.element_size()}: the ranks call different collectives, "
                    "or with different splits.",
                )
            peer.read(address, out)
        return True


class Broadcast(Operation):
    """Copies the first rank's tensor to the others."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__([tensor], tensor.numel() * tensor.element_size(), signature_of(BROADCAST, tensor.dtype))

    def read(self) -> bool:
        for peer in self._channel.peers:
            if peer.rank == 0:
                peer.read(self.address(peer), self._sources[0])
        return True


class SmallAllReduce(Operation):
    """Combines small tensors: every rank reads all of them and combines them in rank order, to the same bits."""

    def __init__(self, tensor: Tensor, op: Any) -> None:
        copy = tensor.clone()  # the others read it while the result replaces the tensor
        super().__init__([copy], tensor.numel() * tensor.element_size(), signature_of(ALL_REDUCE, tensor.dtype, op))
        self._tensor, self._op = tensor, op

    def read(self) -> bool:
        terms: dict[int, Tensor] = {self._channel.rank: self._sources[0]}
        for peer in self._channel.peers:
            terms[peer.rank] = torch.empty_like(self._sources[0])
            peer.read(self.address(peer), terms[peer.rank])
        combine_into(self._tensor, [terms[rank] for rank in range(self._channel.size)], self._op)
        return True


class LargeAllReduce(Operation):
    """Combines large tensors: each rank sums its slice in place, then reads the others' slices."""

    def __init__(self, tensor: Tensor, op: Any) -> None:
        super().__init__(
            [tensor.view(-1)], tensor.numel() * tensor.element_size(), signature_of(ALL_REDUCE, tensor.dtype, op)
        )
        self._op = op
        self._has_summed = False
        self._missing: list[Peer] = []

    def read(self) -> bool:
        channel, flat = self._channel, self._sources[0]
        if not self._has_summed:
            low, high = self._slice(channel.rank)
            mine = flat[low:high]
            places = {peer.rank: self.address(peer) + low * flat.element_size() for peer in channel.peers}
            add_up(channel, mine, places, mine, scale=scale_of(self._op, channel.size), accumulate=False)
            channel.post_phase(self._number)
            self._has_summed = True
            self._missing = self._waiting = list(channel.peers)
        for peer in list(self._missing):
            if channel.has_phase(peer, self._number):
                low, high = self._slice(peer.rank)
                peer.read(self.address(peer) + low * flat.element_size(), flat[low:high])
                self._missing.remove(peer)
        return not self._missing

    def _slice(self, rank: int) -> tuple[int, int]:
        numel, size = self._sources[0].numel(), self._channel.size
        return numel * rank // size, numel * (rank + 1) // size


def add_up(
    channel: Channel, mine: Tensor, places: dict[int, int], out: Tensor, *, scale: float, accumulate: bool
) -> None:
    """Write the sum over ranks of tensors of one length, in rank order.

    Args:
        channel: The ranks.
        mine: This rank's tensor.
        places: Address of each other rank's tensor in its process.
        out: Receives the sum, any floating dtype; may be ``mine``.
        scale: Multiplies the sum.
        accumulate: Add to ``out``.
    """
    itemsize = mine.element_size()
    block = max(SCRATCH_BYTES // itemsize, 1)
    for start in range(0, mine.numel(), block):
        stop = min(start + block, mine.numel())
        room = channel.scratch(len(channel.peers) * (stop - start) * itemsize).view(mine.dtype)
        terms: dict[int, Tensor] = {channel.rank: mine[start:stop]}
        for index, peer in enumerate(channel.peers):
            terms[peer.rank] = room[index * (stop - start) : (index + 1) * (stop - start)]
            peer.read(places[peer.rank] + start * itemsize, terms[peer.rank])
        ordered = [terms[rank] for rank in range(channel.size)]
        sum_into(out[start:stop], ordered, scale=scale, accumulate=accumulate)
