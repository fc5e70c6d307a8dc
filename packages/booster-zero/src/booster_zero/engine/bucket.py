"""Parameters that lie flat, one after the other, and this rank's slice of them: values, gradient, and pieces.

Two ranks, three parameters; the cut falls into ``b``::

    all       |  a  a  a  a  .  |  b  b  b  b  b  b |  c  c  .  |
    rank 0    |<--------- slice of rank 0 --->|                       pieces: a, start of b
    rank 1                                    |<--- of rank 1 ------>|     pieces: rest of b, c

``values`` is what the optimizer updates. Where the whole lies, and when, is a strategy's business: it subclasses
`ShardedBucket`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from booster_runtime import collectives
from booster_runtime.collectives import Pending
from booster_runtime.collectives.sums import sum_into
from booster_zero.engine.lane import Lane, in_ram

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from booster_runtime.sharding import ShardingRanks, State
    from booster_zero.engine.partition import BucketPlan, Slot

_SMALL_NUMEL = 1 << 13
"""Gradients below this many elements travel together: a message costs more than a copy of them."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """The number formats and the place of a parameter's copies; parameters of one format share buckets.

    Args:
        working: Format that forward reads.
        master: Format that the optimizer updates.
        wire: Format in which gradients travel.
        device: Where forward runs.
        home: Where the optimizer steps.
        is_trained: Whether the parameter required a gradient when it was laid out.
        copies: The places of the model (stages of a pipeline) that hold a copy of the parameter each; empty where one
            place has it. Buckets of the same copies must be laid out alike at each of the places.
    """

    working: torch.dtype
    master: torch.dtype
    wire: torch.dtype
    device: torch.device
    home: torch.device
    is_trained: bool
    copies: tuple[int, ...] = ()

    @property
    def has_copy(self) -> bool:
        """Whether the optimizer updates a copy instead of the working values."""
        return self.working != self.master or self.device != self.home


@dataclass(eq=False)
class Piece:
    """The part of one parameter that this rank owns.

    Attributes:
        index: Number of the parameter.
        parameter: The parameter of the user's model.
        start: First element of the flattened parameter.
        stop: One past the last.
        begin: Where the piece begins in this rank's slice of the bucket.
        values: What the optimizer updates: in the parameter's shape where all of it is here, else 1-D.
    """

    index: int
    parameter: nn.Parameter
    start: int
    stop: int
    begin: int
    values: nn.Parameter

    @property
    def is_whole(self) -> bool:
        """Whether the piece is all of the parameter."""
        return self.stop - self.start == self.parameter.numel()


class ShardedBucket:
    """Parameters that are reduced together, and what this rank owns of them.

    Args:
        plan: Layout.
        parameters: The model's parameters by number; those of the plan belong to this bucket.
        format: Formats and places.
        ranks: The ranks that share the bucket.
        values: What the optimizer updates, shape ``(length of this rank's slice,)``, in the master format; written by
            the subclass.

    Collective: none.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[int, nn.Parameter],
        format: Format,  # noqa: A002 - the noun for it
        ranks: ShardingRanks,
        values: Tensor,
    ) -> None:
        self.plan = plan
        self.format = format
        self.ranks = ranks
        self.parameters = [parameters[slot.index] for slot in plan.slots]
        self.values = values
        self.lane = Lane(format.device) if format.home != format.device else None
        self.gradient: Tensor | None = None
        self.has_gradient = False
        self._added: set[int] = set()
        self._is_averaged = False
        self.pieces: list[Piece] = []
        low = plan.bounds[ranks.shard_rank]
        for slot, parameter in zip(plan.slots, self.parameters, strict=True):
            owned = plan.owned(slot, ranks.shard_rank)
            if owned is not None:
                begin = slot.offset + owned[0] - low
                part = values[begin : begin + owned[1] - owned[0]]
                if part.numel() == slot.numel:
                    part = part.view(parameter.shape)
                self.pieces.append(
                    Piece(slot.index, parameter, *owned, begin, nn.Parameter(part, part.is_floating_point()))
                )

    @property
    def moves_values(self) -> bool:
        """Whether ``values`` must be moved when parameters are laid out anew; not where the parameters hold them."""
        return self.format.has_copy

    @property
    def is_active(self) -> bool:
        """Whether any of the parameters is being trained; others take part in no communication."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def adds_at_once(self) -> bool:
        """Whether gradients need not be kept until the whole bucket's have come: what they are added to lies here.

        Strategies whose gradient is at hand at all times say so with `is_all_here`.
        """
        return False

    @property
    def is_all_here(self) -> bool:
        """Whether this rank alone has the slices of all its gradients, where they come into being."""
        return self.ranks.shard_size == 1 and self.format.device == self.format.home

    def slice_of(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Return a piece's part of a 1-D tensor that covers this rank's slice, in the shape of the piece's values."""
        return tensor[piece.begin : piece.begin + piece.stop - piece.start].view(piece.values.shape)

    def make_gradient(self) -> Tensor:
        """Return this rank's gradient to be written to; zeros where there was none."""
        if self.gradient is None:
            self.gradient = in_ram(self.values.numel(), self.format.master, self.format.home, self.format.device)
        self.has_gradient = True
        return self.gradient

    def gradient_of(self, piece: Piece) -> Tensor:
        """Return a piece's part of the gradient to be written to, in the shape of the piece's values."""
        self._added.add(piece.index)
        return self.slice_of(self.make_gradient(), piece)

    def add_gradient(self, slot: Slot, gradient: Tensor) -> None:
        """Add a parameter's gradient to this rank's, which holds all of it.

        Args:
            slot: The parameter's place.
            gradient: Of any floating format and shape.

        Collective: none.
        """
        target = self.make_gradient()[slot.offset : slot.offset + slot.numel]
        sum_into(target, [gradient.reshape(-1)], scale=1.0, accumulate=slot.index in self._added)
        self._added.add(slot.index)

    def _clear_rest(self) -> None:
        """Set the gradient of parameters that nothing was added for to zero: the memory is an earlier step's."""
        gradient = self.make_gradient()
        for slot in self.plan.slots:
            if slot.index not in self._added:
                gradient[slot.offset : slot.offset + slot.numel] = 0
                self._added.add(slot.index)

    @property
    def scratch_numel(self) -> int:
        """Number of elements that `start_reduction` receives from other ranks."""
        return (self.ranks.shard_size - 1) * self.values.numel() if self.format.device.type == "cpu" else 0

    @property
    def averages_at_once(self) -> bool:
        """Whether `start_reduction` averages over the replicas, too; else that is left for the end of all rounds."""
        return self.adds_at_once and self.ranks.replica_group is not None

    def start_reduction(self, gradients: Mapping[int, Tensor], scratch: Tensor) -> Pending:
        """Start adding full gradients, averaged over the shard group, to this rank's gradient.

        Where they were added at once, all that has come together is averaged over the replicas.

        Args:
            gradients: By parameter, flat and in the wire format; zero where there is none. They are only read, and
                left alone until the result has been waited for. None where they were added at once.
            scratch: Memory in the wire format to receive into; left alone as well.

        Collective: the shard group, or the replicas.
        """
        if self.adds_at_once:
            self._clear_rest()
            return self._start_average() if self.averages_at_once else Pending()
        is_first = not self.has_gradient
        target, group, bounds = self.make_gradient(), self.ranks.shard_group, self.plan.bounds
        scale = 1.0 / self.ranks.shard_size
        if self.format.device.type == "cpu":
            parts = self._parts(gradients)
            return collectives.reduce_scatter_parts(
                parts, bounds, target, group, scale=scale, accumulate=not is_first, scratch=scratch
            )
        source = self._joined(self.plan.slots, gradients)
        if self.lane is None:
            return collectives.reduce_scatter(source, bounds, target, group, scale=scale, accumulate=not is_first)
        # The way home begins as soon as the sum is there, while the device goes on with backward.
        landing = target if is_first else in_ram(target.numel(), target.dtype, target.device, source.device)
        with self.lane.entered():
            staged = torch.empty(target.numel(), dtype=self.format.master, device=source.device)
            collectives.reduce_scatter(source, bounds, staged, group, scale=scale).wait()
            landing.copy_(staged, non_blocking=True)
            arrived = self.lane.mark()

        def add_up() -> None:
            if arrived is not None:
                arrived.synchronize()
            if landing is not target:
                target.add_(landing)

        return Pending(finish=add_up, keep=(source, staged))

    def _start_average(self) -> Pending:
        """Start averaging over the replicas what has been added up here, of earlier rounds as well."""
        gradient = self.make_gradient()
        # What was averaged before would be rounded again in each further round.
        wire = gradient.dtype if self._is_averaged else self.format.wire
        self._is_averaged = True
        source = gradient.to(wire)
        average = collectives.all_reduce(source, dist.ReduceOp.AVG, self.ranks.replica_group)
        if source is gradient:
            return average

        def widen() -> None:
            gradient.copy_(source)

        return Pending([average], widen)

    def _parts(self, gradients: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        """Return the bucket's gradient in parts: large ones as they are, runs of small ones joined."""
        parts: list[tuple[int, Tensor]] = []
        run: list[Slot] = []
        for slot in (*self.plan.slots, None):
            if slot is not None and slot.numel < _SMALL_NUMEL:
                run.append(slot)
                continue
            if run:
                parts.append((run[0].offset, self._joined(run, gradients)))
                run = []
            if slot is not None:
                part = gradients.get(slot.index)
                parts.append((slot.offset, self._zeros(slot.numel) if part is None else part))
        return parts

    def _joined(self, slots: Sequence[Slot], gradients: Mapping[int, Tensor]) -> Tensor:
        """Return the gradients of neighbouring slots in one tensor; on devices all of the bucket, padding included."""
        first = slots[0].offset
        end = self.plan.numel if len(slots) == len(self.plan.slots) else slots[-1].offset + slots[-1].numel
        joined = self._zeros(end - first)
        for slot in slots:
            if slot.index in gradients:
                joined[slot.offset - first : slot.offset - first + slot.numel] = gradients[slot.index]
        return joined

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.format.wire, device=self.format.device)

    def at_hand(self, *, changes: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which values, gradient and state lie in memory, for strategies that move them.

        Args:
            changes: Whether they are written to.
        """
        del changes
        return contextlib.nullcontext()

    @property
    def share_numel(self) -> int:
        """Number of elements of this rank's slice."""
        low, high = self.plan.bounds[self.ranks.shard_rank : self.ranks.shard_rank + 2]
        return high - low

    def vacate(self) -> None:
        """Let go of the memory of the parameters, all of which lie in other buckets now, for strategies that can."""

    def leave(self) -> None:
        """Let go of what a strategy keeps of this bucket, because others have taken its place."""

    def state_room(self, piece: Piece, key: str, dtype: torch.dtype) -> Tensor:
        """Return memory for a piece's part of an elementwise state, in the shape of the piece's values; not filled."""
        del key
        return torch.empty(piece.values.shape, dtype=dtype, device=piece.values.device)

    def house(self, states: Mapping[int, State]) -> None:
        """Move what the optimizer keeps of the pieces to where it is to lie, if that is elsewhere.

        Args:
            states: By parameter; entries are replaced.
        """

    def drop_gradient(self) -> None:
        """Forget the gradient. Its memory is kept: asking for it anew in each step takes longer than a sum."""
        self.has_gradient = self._is_averaged = False
        self._added.clear()
        for piece in self.pieces:
            piece.values.grad = None

    def zero_gradient(self) -> None:
        """Set the gradient to zero, where there is one."""
        if self.has_gradient and self.gradient is not None:
            self.gradient.zero_()

    def show_gradient(self, used: Mapping[int, bool]) -> None:
        """Let the optimizer see the gradients of parameters that were used; it leaves the others as they are."""
        for piece in self.pieces:
            piece.values.grad = (
                self.slice_of(self.gradient, piece) if self.gradient is not None and used.get(piece.index) else None
            )
