"""One bucket: parameters that lie flat in one buffer, and this rank's slice of it, which the optimizer updates.

Two ranks, three parameters; the cut falls into ``b``::

    flat      |  a  a  a  a  .  |  b  b  b  b  b  b |  c  c  .  |     working values, whole on every rank
    rank 0    |<--------- slice of rank 0 --->|                       pieces: a, start of b
    rank 1                                    |<--- of rank 1 ------>|     pieces: rest of b, c

Parameters are views of ``flat``, so a gather of slices lands in them. ``values`` is what the optimizer updates: the
slice itself, or a copy of it in another format (fp32 masters) or memory (the host).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster_core import collectives
from booster_core.collectives import Pending
from booster_core.errors import ConfigError
from booster_core.sharding.hosting import is_cut
from booster_zero.room import Lane, Room, in_ram

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from booster_core.sharding.hosting import State
    from booster_core.sharding.ranks import ShardingRanks
    from booster_zero.partition import BucketPlan, Slot


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
    """

    working: torch.dtype
    master: torch.dtype
    wire: torch.dtype
    device: torch.device
    home: torch.device
    is_trained: bool

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


class Bucket:
    """Parameters that are reduced and gathered together.

    Args:
        plan: Layout.
        parameters: The model's parameters by number; those of the plan become views of this bucket.
        format: Formats and places.
        ranks: The ranks that share the bucket.
        room: Where what the optimizer updates and keeps is to lie.

    Collective: none; values are taken from this rank's parameters.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[int, nn.Parameter],
        format: Format,  # noqa: A002 - the noun for it
        ranks: ShardingRanks,
        room: Room | None = None,
    ) -> None:
        self.room = room or Room()
        self.plan = plan
        self.format = format
        self.ranks = ranks
        self.parameters = [parameters[slot.index] for slot in plan.slots]
        self.flat = torch.zeros(plan.numel, dtype=format.working, device=format.device)
        low, high = plan.bounds[ranks.shard_rank], plan.bounds[ranks.shard_rank + 1]
        self.own = self.flat[low:high]
        self.values = (
            self.room.zeros(high - low, format.master, format.home, format.device) if format.has_copy else self.own
        )
        self._lane = Lane(format.device) if format.home != format.device else None
        self._files: dict[tuple[str, torch.dtype], Tensor] = {}
        self.gradient: Tensor | None = None
        self.has_gradient = False
        self.pieces: list[Piece] = []
        for slot, parameter in zip(plan.slots, self.parameters, strict=True):
            source = parameter.data.reshape(-1)
            owned = plan.owned(slot, ranks.shard_rank)
            if owned is not None:
                begin = slot.offset + owned[0] - low
                part = self.values[begin : begin + owned[1] - owned[0]]
                part.copy_(source[owned[0] : owned[1]])
                if part.numel() == slot.numel:
                    part = part.view(parameter.shape)
                self.pieces.append(Piece(slot.index, parameter, *owned, begin, nn.Parameter(part)))
            place = self.flat[slot.offset : slot.offset + slot.numel]
            place.copy_(source)
            parameter.data = place.view(parameter.shape)
        self._versions: list[int] = []
        self.note_versions()

    @property
    def is_active(self) -> bool:
        """Whether any of the parameters is being trained; others take part in no communication."""
        return any(parameter.requires_grad for parameter in self.parameters)

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
        """Return a piece's part of the gradient, in the shape of the piece's values."""
        return self.slice_of(self.make_gradient(), piece)

    @property
    def scratch_numel(self) -> int:
        """Number of elements that `start_reduction` receives from other ranks."""
        return (self.ranks.shard_size - 1) * self.values.numel() if self.format.device.type == "cpu" else 0

    def start_reduction(self, gradients: Mapping[int, Tensor], scratch: Tensor) -> Pending:
        """Start adding full gradients, averaged over the shard group, to this rank's gradient.

        Args:
            gradients: By parameter, flat and in the wire format; zero where there is none. They are only read, and
                left alone until the result has been waited for.
            scratch: Memory in the wire format to receive into; left alone as well.

        Collective: the shard group.
        """
        is_first = not self.has_gradient
        target, group, bounds = self.make_gradient(), self.ranks.shard_group, self.plan.bounds
        scale = 1.0 / self.ranks.shard_size
        if self.format.device.type == "cpu":
            parts = self._parts(gradients)
            return collectives.reduce_scatter_parts(
                parts, bounds, target, group, scale=scale, accumulate=not is_first, scratch=scratch
            )
        source = self._joined(self.plan.slots, gradients)
        if self._lane is None:
            return collectives.reduce_scatter(source, bounds, target, group, scale=scale, accumulate=not is_first)
        # The way home begins as soon as the sum is there, while the device goes on with backward.
        landing = target if is_first else in_ram(target.numel(), target.dtype, target.device, source.device)
        with self._lane.entered():
            staged = torch.empty(target.numel(), dtype=self.format.master, device=source.device)
            collectives.reduce_scatter(source, bounds, staged, group, scale=scale).wait()
            landing.copy_(staged, non_blocking=True)
            arrived = self._lane.mark()

        def add_up() -> None:
            if arrived is not None:
                arrived.synchronize()
            if landing is not target:
                target.add_(landing)

        return Pending(finish=add_up, keep=(source, staged))

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

    def drop_gradient(self) -> None:
        """Forget the gradient. Its memory is kept: asking for it anew in each step takes longer than a sum."""
        self.has_gradient = False
        for piece in self.pieces:
            piece.values.grad = None

    def show_gradient(self, used: Mapping[int, bool]) -> None:
        """Let the optimizer see the gradients of parameters that were used; it leaves the others as they are."""
        for piece in self.pieces:
            piece.values.grad = (
                self.slice_of(self.gradient, piece) if self.gradient is not None and used.get(piece.index) else None
            )

    def note_versions(self) -> None:
        """Count the working values as those that the optimizer knows of."""
        self._versions = [parameter._version for parameter in self.parameters]  # noqa: SLF001 - as autograd does

    def notice_changes(self, names: Mapping[int, str]) -> None:
        """Take in what somebody else has written into the parameters since the last update, such as loaded values.

        Raises:
            ConfigError: If a parameter has left the bucket: updates would not reach it any more.
        """
        for slot, parameter in zip(self.plan.slots, self.parameters, strict=True):
            expected = self.flat.data_ptr() + slot.offset * self.flat.element_size()
            if slot.numel and parameter.data_ptr() != expected:
                msg = (
                    f"Parameter '{names[slot.index]}' was given other memory after `boost`, by `.data = ...`, "
                    "`.to(...)` or the like. Copy values into it in place, for example with `parameter.copy_(values)`."
                )
                raise ConfigError(msg)
        known = self._versions
        self.note_versions()
        if self.format.has_copy and known != self._versions:
            self.take_working_values()

    def take_working_values(self) -> None:
        """Bring the optimizer's values up to date with this rank's working values.

        Where a master rounds to the working value that is there, it is the truer of the two, and stays.
        """
        if self.format.has_copy:
            own = self.own.to(self.values.device)
            is_stale = self.values.to(own.dtype) != own
            self.values.copy_(torch.where(is_stale, own.to(self.values.dtype), self.values))

    def publish(self) -> Pending:
        """Start bringing what the optimizer updated into every rank's parameters.

        Collective: the shard group.
        """
        bounds, group = self.plan.bounds, self.ranks.shard_group
        if self._lane is None:
            if self.format.has_copy:
                self.own.copy_(self.values)
            return collectives.all_gather(self.flat, bounds, group)
        values = self.values
        if values.dtype != self.own.dtype:
            values = in_ram(values.numel(), self.own.dtype, values.device, self.own.device).copy_(values)
        with self._lane.entered():
            self.own.copy_(values, non_blocking=True)
            copied = self._lane.mark()
            gathered = collectives.all_gather(self.flat, bounds, group)

        def finish() -> None:
            if copied is not None:
                copied.synchronize()  # `values` may be changed again

        return Pending([gathered], finish, keep=values)

    # ---- what the optimizer keeps

    def state_room(self, piece: Piece, key: str, dtype: torch.dtype) -> Tensor:
        """Return memory for a piece's part of an elementwise state, in the shape of the piece's values; not filled."""
        filed = self._filed(key, dtype)
        if filed is None:
            return torch.empty(piece.values.shape, dtype=dtype, device=self.format.home)
        return self.slice_of(filed, piece)

    def house(self, states: Mapping[int, State]) -> None:
        """Move what the optimizer has made in RAM, of the pieces' elementwise state, to where it is to lie.

        What finds no room there stays.

        Args:
            states: By parameter, what the optimizer keeps; entries are replaced.
        """
        if not self.room.is_on_disk:
            return
        for piece in self.pieces:
            state = states.get(piece.index, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or not is_cut(key, value, piece.values.shape):
                    continue
                filed = self._filed(key, value.dtype)
                if filed is None or filed.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                    continue
                state[key] = self.slice_of(filed, piece).copy_(value)

    def _filed(self, key: str, dtype: torch.dtype) -> Tensor | None:
        """Return the file that holds a state of all of this rank's pieces, end to end; ``None`` where there is none."""
        if not self.room.is_on_disk or self.format.home.type != "cpu":
            return None
        known = self._files.get((key, dtype))
        if known is None:
            known = self.room.filed(self.values.numel(), dtype)
            if known is not None:
                self._files[key, dtype] = known
        return known
