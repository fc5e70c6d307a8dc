"""Parameters that are gathered and reduced together: their values, the sum of their gradients, and this rank's slice.

A bucket is laid out flat; each rank owns a slice of it. Two ranks, three parameters; the cut falls into ``b``::

    all       |  a  a  a  a  .  |  b  b  b  b  b  b |  c  c  .  |
    rank 0    |<--------- slice of rank 0 --->|                       pieces: a, start of b
    rank 1                                    |<--- of rank 1 ------>|     pieces: rest of b, c

Its values go through the states of `WholeState`; `Keep` says how long a rank has the whole values. Where they are
gathered, parameters are views of them, so that a gather of slices arrives in the parameters. Elsewhere parameters are
absent: see `booster_runtime.memory.absent`. Whole values live as long as anything refers to them, so a bucket may be
released at any time: what still reads it keeps its own view.

The slice is in up to three flat buffers, which a `Memory` may move: working values, the gradient, and what the
optimizer updates where that is a copy (fp32 masters, or values on the host), with its elementwise state. The gradient
is where the optimizer steps; where that is not forward's device, a copy of the values is there too. So sums go down
once, new values come up once, and nothing else moves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.ranks import refuse_capture
from booster_runtime import collectives
from booster_runtime.collectives import Pending, in_place_terms, sum_into
from booster_runtime.memory import AbsentTensors
from booster_zero.engine.memory import FlatBuffer, Role
from booster_zero.engine.partition import GradientPacker, cut_pieces, is_elementwise
from booster_zero.engine.states import TRANSITIONS, Keep, WholeState, check_transition

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from booster_runtime.sharding import ShardingRanks, State
    from booster_zero.engine.memory import BufferPool, Memory
    from booster_zero.engine.partition import BucketPiece, BucketPlan, Format

_ALIGNMENT_BYTES = 64
"""What tensors in one buffer begin at multiples of."""

FEW_NUMEL = 1 << 12
"""Elements of a block where memory counts for more than time, as in `boost`."""
_BLOCK_NUMEL = 1 << 20
"""Values are compared in blocks of this many elements, which need little memory."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_numbers = itertools.count()


class User(Protocol):
    """Who gathers buckets, and is told what becomes of their parameters."""

    def on_use(self, bucket: Bucket, index: int, what: str) -> AbstractContextManager[None] | None:
        """Gather a bucket one of whose parameters is used, or raise; see `AbsentTensors`."""

    def on_show(self, bucket: Bucket) -> None:
        """Take note of a bucket whose parameters have just got values."""

    def on_hide(self, bucket: Bucket) -> None:
        """Take note of a bucket whose parameters are about to lose them."""


class Bucket:
    """Parameters that are reduced and gathered together.

    Args:
        plan: Layout.
        parameters: The model's parameters by number; those of the plan become views of this bucket, or absent.
        format: Formats and devices.
        ranks: The ranks that share the bucket.
        memory: Keeps this rank's slice.
        pool: Lends memory for whole values; ``None`` keeps them always.
        user: Gathers it; it is not kept alive. ``None`` where nobody does.
        valued: Numbers of the parameters whose values are taken; ``None`` for all. The others are zero at first.

    Attributes:
        keep: How long this rank has the whole values.
        whole: Those values; ``None`` where they are not here.
        address: Where these are in memory; 0 where they are not here.
        state: What is here of them.
        arriving: What brings the whole values, where nobody has waited for them yet.
        has_gradient: Whether there is a gradient of any of the parameters; its memory is kept where there is none.
        pins: How many users there are that need the whole values to stay.
        has_masters: Whether the optimizer updates a copy in another format.
        has_copy: Whether it updates a copy, in another format or on another device than forward's.
        pieces: The parts of parameters that the slice is made of; the optimizer steps on their ``values``.
        piece_of: The same by the parameter's number.
        num_parts: Number of parts of a batch whose gradients add up to that number of times the batch's.

    Collective: none; values are taken from this rank's parameters.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[int, nn.Parameter],
        format: Format,  # noqa: A002 - the noun for it
        ranks: ShardingRanks,
        *,
        memory: Memory,
        pool: BufferPool | None = None,
        user: User | None = None,
        valued: Container[int] | None = None,
    ) -> None:
        self.plan = plan
        self.parameters = [parameters[slot.index] for slot in plan.slots]
        self.format = format
        self.ranks = ranks
        self.memory = memory
        self.keep = Keep.ALWAYS if pool is None else Keep.IN_USE
        self.state = WholeState.GATHERED if pool is None else WholeState.SHARDED
        self.has_gradient = False
        self._is_summed = False  # since the replicas have averaged
        self._added: set[int] = set()
        self.pins = 0
        self.num_parts = 1
        self.has_masters = format.working != format.master
        self._pool = pool
        self._user = _nobody if user is None else weakref.ref(user)
        self.arriving: Pending | None = None
        self._shown: list[Tensor] | None = None  # what parameters are shown, as long as the whole values stay
        self._sums: Tensor | None = None  # of the slice as the optimizer's values were rounded to it
        self._used: Mapping[int, bool] = {}
        self._number = next(_numbers)
        self._uses: dict[Role, int] = {}  # of the buffers that the memory may move
        self._sent = Pending()  # values on their way from the host to the device
        self._gradient: FlatBuffer | None = None
        self._states: dict[int, State] = {}
        self._packed: list[tuple[int, str, Tensor]] = []

        low, high = plan.bounds[ranks.shard_rank : ranks.shard_rank + 2]
        self.whole: Tensor | None = None
        self.address = 0
        if pool is None:
            self.whole = torch.zeros(plan.numel, dtype=format.working, device=format.device)
            self.address = self.whole.data_ptr()
            own = self.whole[low:high]
        else:
            own = memory.zeros(high - low, format.working, format.device, format.device)
        self._own = FlatBuffer(self._number, Role.PARAM, own)
        self._optim: FlatBuffer | None = None
        if format.has_copy:
            num_bytes = (high - low) * format.master.itemsize
            copy = memory.zeros(num_bytes, torch.uint8, format.step_device, format.device)
            self._optim = FlatBuffer(self._number, Role.OPTIM, copy)
        self.has_copy = format.has_copy
        self.pieces = list(cut_pieces(plan, self.parameters, ranks.shard_rank, self.values))
        self.piece_of = {piece.index: piece for piece in self.pieces}
        self._follow_values()
        self._take_values(valued)

    def _take_values(self, valued: Container[int] | None) -> None:
        """Take the parameters' values, and let these be views of the whole ones, or absent."""
        taken = [piece for piece in self.pieces if valued is None or piece.index in valued]
        for piece in taken:
            part = piece.parameter.data.reshape(-1)[piece.start : piece.stop]
            piece.values.data.copy_(part.view(piece.values.shape))
        if self.whole is not None:
            for place, parameter in zip(map(self.whole.as_strided, *self._places), self.parameters, strict=True):
                place.copy_(parameter.data)
                parameter.data = place
            self._note_sums(FEW_NUMEL)
            return
        if taken and self.has_copy:
            self.own.copy_(self.values)
        self._add(self._own)
        if self.has_copy and self.memory.moves:
            self._pack({})
        self._absent.hide()

    # ---- this rank's slice

    @property
    def numel(self) -> int:
        """Number of elements of this rank's slice."""
        low, high = self.plan.bounds[self.ranks.shard_rank : self.ranks.shard_rank + 2]
        return high - low

    @property
    def own(self) -> Tensor:
        """The slice in the working format, shape ``(numel,)``. It is in use."""
        return self._own.tensor

    @property
    def values(self) -> Tensor:
        """What the optimizer updates, shape ``(numel,)``: the slice itself, or a copy. It is in use."""
        if not self.has_copy:
            return self._own.tensor
        assert self._optim is not None, "what has a copy has a buffer for it"
        return self._optim.tensor[: self.numel * self.format.master.itemsize].view(self.format.master)

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient, shape ``(numel,)``; ``None`` where there was none yet. It is in use."""
        return None if self._gradient is None else self._arrived(self._gradient)

    def slice_of(self, tensor: Tensor, piece: BucketPiece) -> Tensor:
        """Return a piece's part of a 1-D tensor that covers this rank's slice, in the shape of the piece's values."""
        return tensor[piece.begin : piece.begin + piece.stop - piece.start].view(piece.values.shape)

    @contextlib.contextmanager
    def in_use(self, *roles: Role, changes: bool) -> Iterator[None]:
        """Have buffers where they can be computed with, for the block of code.

        Args:
            *roles: Which; none for all. Those that are not there are left out.
            changes: Whether the code writes to them.
        """
        present = [role for role in roles or Role if role in self._uses]
        for pending in [self._start_use(role) for role in present]:
            pending.wait()
        try:
            yield
        finally:
            for role in present:
                self._end_use(role, changed=changes)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield what this rank keeps of the bucket between steps, as far as it has values where they are used."""
        buffers = (self._own, self._gradient, self._optim)
        yield from (buffer.tensor for buffer in buffers if buffer is not None)
        if self.whole is not None:
            yield self.whole
        for piece in self.pieces:
            yield piece.values
        for state in self._states.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def free(self) -> None:
        """Give up all memory, because other buckets have taken this one's place; others may still hold the object."""
        for buffer in (self._own, self._gradient, self._optim):
            if buffer is not None:
                self._drop(buffer)
                buffer.point(None)
        self._gradient = None

    def _buffer(self, role: Role) -> FlatBuffer | None:
        if role is Role.PARAM:
            return self._own
        return self._gradient if role is Role.GRAD else self._optim

    def _start_use(self, role: Role) -> Pending:
        buffer = self._buffer(role)
        if buffer is None:
            return Pending()
        if role in self._uses:
            self._uses[role] += 1
        elif self.memory.moves:  # a rank may own nothing of a bucket
            return Pending()
        return self.memory.fetch(buffer)

    def _use(self, role: Role) -> None:
        """Begin a use of a buffer, and wait until it is there."""
        if self.memory.moves:
            self._start_use(role).wait()
        elif (buffer := self._buffer(role)) is not None:
            buffer.arrive()

    def _end_use(self, role: Role, *, changed: bool) -> None:
        if role in self._uses and (buffer := self._buffer(role)) is not None:
            self._uses[role] -= 1
            self.memory.release(buffer, changed=changed)

    def _add(self, buffer: FlatBuffer, uses: int = 0) -> None:
        """Let the memory move a buffer, if it moves any, and begin so many uses of it."""
        if not self.memory.moves or not buffer.num_bytes:
            return
        role = buffer.key[1]
        self._uses[role] = 0
        self.memory.add(buffer)
        for _ in range(uses):
            self._use(role)

    def _drop(self, buffer: FlatBuffer) -> int:
        """Take a buffer from the memory, and return how many uses of it were going on."""
        role = buffer.key[1]
        if role not in self._uses:
            return 0
        for _ in range(self._uses[role]):
            self.memory.release(buffer, changed=False)
        self.memory.drop(buffer)
        return self._uses.pop(role)

    # ---- values

    def round_values(self) -> Pending:
        """Start bringing the slice in the working format up to date with what the optimizer updated.

        The slice's next use finds it; wait before the optimizer's values change again.
        """
        if not self.has_copy:
            return Pending()
        assert self._optim is not None, "what has a copy has a buffer for it"
        if self._own.device.type == self._optim.device.type:
            with self.in_use(Role.PARAM, Role.OPTIM, changes=True):
                self.own.copy_(self.values)
            return Pending()
        with self.in_use(Role.OPTIM, changes=False):
            if self.numel:
                self._sent = self.memory.write(self._own, self.values)
        return self._sent

    def take_working_values(self, written: Tensor | None = None, block_numel: int = _BLOCK_NUMEL) -> None:
        """Bring the optimizer's values up to date with the slice in the working format. Both are in use.

        Where a master rounds to the working value that is there, it is the truer of the two, and stays.

        Args:
            written: A flag, where forward runs, that is zero where nothing is to be taken.
            block_numel: How many elements are compared at a time.
        """
        if not self.has_copy:
            return
        self._sent.wait()
        room = torch.empty(min(self.numel, block_numel), dtype=self.own.dtype, device=self.values.device)
        for start in range(0, self.numel, block_numel):
            values = self.values[start : start + block_numel]
            own = self.own[start : start + block_numel].to(values.device)
            stays = room[: len(own)].copy_(values) == own
            if written is not None:
                stays |= ~written
            torch.where(stays, values, own.to(values.dtype), out=values)
        self._note_sums(block_numel)

    def _note_sums(self, block_numel: int = _BLOCK_NUMEL) -> None:
        """Remember the working values that the optimizer's are up to date with; see `bit_sums`."""
        if self.keep is Keep.ALWAYS and self.has_copy:
            self._sums = bit_sums(self.own, block_numel)

    def _follow_values(self) -> None:
        """Let the pieces that the optimizer steps on follow what it updates."""
        buffer = self._optim if self.has_copy else self._own
        assert buffer is not None, "what has a copy has a buffer for it"
        itemsize = (self.format.master if self.has_copy else self.format.working).itemsize
        self._own.drop_views()
        for piece in self.pieces:
            buffer.add_view(piece.values, piece.begin * itemsize)

    # ---- whole values that are always here

    def check_place(self, names: Mapping[int, str]) -> None:
        """Check that the parameters are still views of the whole values.

        Raises:
            ConfigError: If one has left the bucket: updates would not reach it any more.
        """
        found, expected = self.addresses(), self.expected_addresses()
        if found == expected:
            return
        for slot, parameter, address, own in zip(self.plan.slots, self.parameters, found, expected, strict=True):
            # Layers that quantize give frozen weights other memory in each forward.
            if own and address != own and parameter.requires_grad:
                remedy = "Copy values into it in place, for example with `parameter.copy_(values)`."
                raise _left(names[slot.index], remedy)

    def is_written(self) -> Tensor | None:
        """Return a flag, where forward runs, of working values that somebody has written since the optimizer's were.

        All of this rank's are in it: what is written through ``.data`` leaves no other trace. Masters that a script has
        written, such as by a decay of its own, are not. ``None`` where the optimizer updates the working values.
        """
        return None if self._sums is None else (bit_sums(self.own) != self._sums).any()

    def note_arrived(self) -> None:
        """Take note that the values are here which the optimizer has updated."""
        self._note_sums()

    # ---- whole values for a time

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters can be read."""
        return self.state is WholeState.GATHERED

    @functools.cached_property
    def whole_bytes(self) -> int:
        """What the whole values take, in bytes."""
        return self.plan.numel * self.format.working.itemsize

    def start_gather(self) -> None:
        """Start bringing the whole values here.

        Collective: every rank of the shard group, in the same order among buckets.
        """
        assert self._pool is not None, "what is always whole is not gathered"
        refuse_capture("gather of parameters")
        self._become(WholeState.ARRIVING)
        bounds, rank, moves = self.plan.bounds, self.ranks.shard_rank, self.memory.moves
        if moves:
            self._start_use(Role.PARAM).wait()
        else:
            self._own.arrive()
        if self.ranks.shard_size == 1:
            self.whole = whole = self._own.tensor
            self.address = whole.data_ptr()
            return
        if moves:
            self.memory.reserve(self.whole_bytes)
        self.whole = whole = self._pool.take(bounds[-1], self.format.working, self.format.device)
        self.address = whole.data_ptr()
        whole[bounds[rank] : bounds[rank + 1]].copy_(self._own.tensor)
        if moves:
            self._end_use(Role.PARAM, changed=False)
        self.arriving = collectives.all_gather(whole, bounds, self.ranks.gathering)

    def finish_gather(self) -> None:
        """Wait for the whole values, and let the parameters be views of them.

        Collective: none; the gather was entered when it was started.
        """
        whole = self.arrived()
        if self._shown is None:
            self._shown = [*map(whole.as_strided, *self._places)]  # one call where a loop would make many
        self._absent.show(self._shown)
        self._become(WholeState.GATHERED)
        if (user := self._user()) is not None:
            user.on_show(self)

    def arrived(self) -> Tensor:
        """Wait for the whole values, and return them, shape ``(length of the bucket,)``.

        Collective: none; the gather was entered when it was started.
        """
        arriving, self.arriving = self.arriving, None
        if arriving is not None:
            arriving.wait()
        assert self.whole is not None, "a gather that has been started has a buffer"
        return self.whole

    @functools.cached_property
    def _absent(self) -> AbsentTensors:
        own = weakref.WeakMethod(self._on_use)  # a parameter must not keep alive what it belongs to

        def on_use(position: int, what: str) -> AbstractContextManager[None] | None:
            method = own()
            assert method is not None, "tensors are asked of as long as their bucket lives"
            return method(position, what)

        return AbsentTensors(
            self.parameters,
            on_use,
            dtype=self.format.working,
            device=self.format.device,
        )

    def _on_use(self, position: int, what: str) -> AbstractContextManager[None] | None:
        user = self._user()
        if user is None:
            msg = f"`{what}` needs the values of a parameter whose boosted model is gone, and its shards with it."
            raise ConfigError(msg)
        return user.on_use(self, self.plan.slots[position].index, what)

    def await_gather(self, pending: Pending) -> None:
        """Let the parameters be absent until `finish_gather`: values that are always here are on their way."""
        self.arriving = pending
        self._become(WholeState.ARRIVING)
        self._absent.hide()

    def hide(self) -> None:
        """Let the parameters be absent; the whole values stay for the next use."""
        user = self._user()
        if user is not None:
            user.on_hide(self)
        self._become(WholeState.ARRIVING)
        self._absent.hide()

    def release(self) -> None:
        """Forget the whole values. Whoever still reads views of them keeps their memory alive."""
        if self.state is WholeState.SHARDED:
            return
        assert self._pool is not None, "what is always whole is not released"
        if self.state is WholeState.GATHERED:
            self.hide()
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None
        self._become(WholeState.SHARDED)
        whole, self.whole, self._shown = self.whole, None, None
        self.address = 0
        if whole is None:  # its gather failed
            return
        if self.ranks.shard_size == 1:
            self._end_use(Role.PARAM, changed=False)
            return
        if self.memory.moves:
            self.memory.free(self.whole_bytes)
        self._pool.give(whole)

    @functools.cached_property
    def position_of(self) -> dict[int, int]:
        """Where parameters are among those of the bucket, by their numbers."""
        return {slot.index: position for position, slot in enumerate(self.plan.slots)}

    @functools.cached_property
    def _offsets(self) -> list[tuple[int, int]]:
        """Where the parameters begin in the whole values, in bytes, and how many elements they have."""
        return [(offset, slot.numel) for offset, slot in zip(self.byte_offsets, self.plan.slots, strict=True)]

    @functools.cached_property
    def byte_offsets(self) -> list[int]:
        """Where the parameters begin in the whole values, in bytes."""
        itemsize = self.format.working.itemsize
        return [slot.offset * itemsize for slot in self.plan.slots]

    @functools.cached_property
    def _places(self) -> tuple[list[torch.Size], list[tuple[int, ...]], list[int]]:
        """The parameters' shapes, their strides, as they are contiguous, and where they begin in the whole values."""
        like = [torch.empty(parameter.shape, device="meta") for parameter in self.parameters]
        shapes, strides = [each.shape for each in like], [each.stride() for each in like]
        return shapes, strides, [slot.offset for slot in self.plan.slots]

    def addresses(self) -> list[int]:
        """Return where the parameters' values are now."""
        return [*map(torch.Tensor.data_ptr, self.parameters)]  # one call where a loop would make many

    def expected_addresses(self) -> list[int]:
        """Return where those are that are views of the whole values; 0 for parameters that take no memory."""
        address = self.address
        return [address + offset if numel else 0 for offset, numel in self._offsets]

    def write_back(self) -> None:
        """Take this rank's slice from the parameters, some of which somebody has changed, or given other memory.

        Raises:
            ConfigError: If one has another shape now.
        """
        assert self.whole is not None, "only what is gathered can have been changed"
        for place, parameter in zip(map(self.whole.as_strided, *self._places), self.parameters, strict=True):
            if parameter.data_ptr() != place.data_ptr():
                if parameter.shape != place.shape:
                    found = tuple(parameter.shape)
                    msg = f"A parameter of shape {tuple(place.shape)} was given values of shape {found}."
                    raise ConfigError(msg)
                place.copy_(parameter.data)
                parameter.data = place
        bounds, rank = self.plan.bounds, self.ranks.shard_rank
        with self.in_use(Role.PARAM, Role.OPTIM, changes=True):
            if self.ranks.shard_size > 1:
                self.own.copy_(self.whole[bounds[rank] : bounds[rank + 1]])
            self.take_working_values()

    def _become(self, state: WholeState) -> None:
        if state not in TRANSITIONS[self.state]:
            check_transition(self.state, state)
        self.state = state

    # ---- updates

    def publish(self) -> Pending:
        """Start bringing what the optimizer updated into the slice and, if always whole, every rank's parameters.

        Collective: the shard group, where the whole values are always here; else none.
        """
        sent = self.round_values()
        if self.whole is None or self.keep is not Keep.ALWAYS or self.ranks.shard_size == 1:
            return sent
        if self.format.step_device == self.format.device:
            return collectives.all_gather(self.whole, self.plan.bounds, self.ranks.shard_group)
        with self.memory.copy_stream(self.format.device, up=True).own_order():
            gathered = collectives.all_gather(self.whole, self.plan.bounds, self.ranks.shard_group)
        return Pending([gathered, sent])

    def increment_versions(self) -> None:
        """Tell autograd that the parameters have other values: it refuses to run former graphs backward."""
        torch.autograd.graph.increment_version(self.parameters)
        if self.is_gathered and self.keep is not Keep.ALWAYS and (user := self._user()) is not None:
            user.on_show(self)

    # ---- gradient

    @property
    def awaits_average(self) -> bool:
        """Whether the gradient has been summed since `start_average` averaged it over the replicas."""
        return self._is_summed and self.ranks.replica_group is not None and not self.adds_at_once

    def make_gradient(self) -> Tensor:
        """Return this rank's gradient to be written to, where the optimizer steps; zeros where there was none."""
        return self._arrived(self._placed_gradient())

    def _arrived(self, buffer: FlatBuffer) -> Tensor:
        buffer.arrive()
        return buffer.tensor

    def _placed_gradient(self) -> FlatBuffer:
        """Return the gradient's memory where the optimizer steps, to which a sum may be on its way."""
        device = self.format.step_device if self._optim is None else self._optim.device
        if self._gradient is None or self._gradient.device.type != device.type:
            return self._place_gradient(device)
        return self._gradient

    def _place_gradient(self, device: torch.device) -> FlatBuffer:
        """Have memory for the gradient on a device, move there what there is, and return it."""
        made = self.memory.zeros(self.numel, self.format.master, device, self.format.device)
        uses, before = 0, self._gradient
        if before is not None:
            if self.has_gradient:
                with self.in_use(Role.GRAD, changes=False):
                    made.copy_(self._arrived(before))
            uses = self._drop(before)
        self._gradient = placed = FlatBuffer(self._number, Role.GRAD, made)
        self._add(placed, uses)
        return placed

    def take_gradient_state(self, other: Bucket) -> None:
        """Have a gradient that comes from another bucket; a sum that is not averaged makes all of it such a one."""
        self.make_gradient()
        self.has_gradient = True
        self._is_summed |= other.awaits_average

    def drop_gradient(self) -> None:
        """Forget the gradient. Its memory is kept: asking for it again in each step takes longer than a sum."""
        if self._gradient is not None and Role.GRAD in self._uses and self.has_gradient:
            self.memory.forget(self._gradient)
        self.has_gradient = self._is_summed = False
        self._added.clear()

    def zero_gradient(self) -> None:
        """Set the gradient to zero, where there is one."""
        if self.has_gradient:
            with self.in_use(Role.GRAD, changes=True):
                self.make_gradient().zero_()

    def zero_gradient_of(self, index: int) -> None:
        """Set this rank's part of one parameter's gradient to zero, where there is one."""
        if self.has_gradient:
            with self.in_use(Role.GRAD, changes=True):
                for piece in self.pieces:
                    if piece.index == index:
                        self.slice_of(self.make_gradient(), piece).zero_()

    def note_used(self, used: Mapping[int, bool]) -> None:
        """Take note of which parameters were used: the optimizer leaves the others as they are."""
        self._used = used

    def used_pieces(self) -> list[tuple[BucketPiece, Tensor]]:
        """Return the pieces whose parameters were used, and their gradients. The gradient is in use."""
        if self._gradient is None or not self.has_gradient:
            return []
        used, gradients = self._used, self.gradients_by_parameter()
        return [(piece, gradients[piece.index]) for piece in self.pieces if used.get(piece.index)]

    def gradients_by_parameter(self) -> dict[int, Tensor]:
        """Return each piece's part of the gradient, in the shape of its values. The gradient is there, and in use."""
        buffer = self._gradient
        assert buffer is not None, "asked for parts of a gradient that is not there"
        buffer.arrive()
        if not buffer.parts:
            buffer.parts = {piece.index: self.slice_of(buffer.tensor, piece) for piece in self.pieces}
        return buffer.parts

    def used_gradients(self) -> list[Tensor]:
        """Return the gradients of pieces whose parameters were used. The gradient is in use."""
        return [gradient for _, gradient in self.used_pieces() if gradient.numel()]

    # ---- reduction

    @property
    def num_trained(self) -> int:
        """Number of parameters that are being trained."""
        return [parameter.requires_grad for parameter in self.parameters].count(True)

    @functools.cached_property
    def adds_at_once(self) -> bool:
        """Whether a gradient is added to this rank's as it comes: all of it is here at all times."""
        return not self.memory.moves and self.ranks.shard_size == 1 and self.format.device == self.format.step_device

    @property
    def averages_at_once(self) -> bool:
        """Whether `start_reduction` averages over the replicas, too; else that is left for the end of all rounds."""
        return self.adds_at_once and self.ranks.replica_group is not None

    @property
    def scratch_numel(self) -> int:
        """Number of elements that `start_reduction` receives from other ranks, but for what it receives in place."""
        size = self.ranks.shard_size
        if self.format.device.type != "cpu" or self.format.is_table or size == 1:
            return 0
        num_in_place = 0 if self.has_gradient else in_place_terms(size, self.format.wire, self.format.master)
        return (size - 1 - num_in_place) * self.numel

    def gradient_of(self, piece: BucketPiece) -> Tensor:
        """Return a piece's part of the gradient to be written to, in the shape of the piece's values."""
        self._added.add(piece.index)
        return self.slice_of(self.make_gradient(), piece)

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Add a parameter's gradient to this rank's, which holds all of it.

        Args:
            index: The parameter's number.
            gradient: In the parameter's shape, of any floating format.
        """
        if not self.has_gradient:
            self.make_gradient()
            self.has_gradient = self._is_summed = True
        target, added = self.gradients_by_parameter()[index], self._added
        count = self.ranks.num_shares * self.num_parts
        if count == 1 and index not in added:
            target.copy_(gradient)
        else:
            sum_into(target, [gradient], scale=1.0 / count, accumulate=index in added)
        added.add(index)

    def _clear_rest(self) -> None:
        """Set the gradient of parameters that nothing was added for to zero: the memory is an earlier step's."""
        gradient = self.make_gradient()
        if len(self._added) == len(self.plan.slots):
            return
        for slot in self.plan.slots:
            if slot.index not in self._added:
                gradient[slot.offset : slot.offset + slot.numel] = 0
                self._added.add(slot.index)

    def start_reduction(self, gradients: Mapping[int, Tensor], scratch: Tensor) -> Pending:
        """Start adding full gradients, averaged over the shard group, to this rank's gradient.

        Where they were added at once, the sum is averaged over the replicas.

        Args:
            gradients: By parameter, flat and in the wire format; zero where there is none. They are only read, and
                left alone until the result has been waited for. None where they were added at once.
            scratch: Memory in the wire format to receive into; left alone as well.

        Collective: the shard group, or the replicas.
        """
        if self.adds_at_once:
            self._clear_rest()
            # What was averaged before would be rounded again in each further round.
            wire = self.format.wire if self._is_summed else self.format.master
            self.has_gradient, self._is_summed = True, False
            return self._start_average(wire) if self.averages_at_once else Pending()
        is_first = not self.has_gradient
        self._placed_gradient()
        self.has_gradient = self._is_summed = True
        return self._start_sum(gradients, scratch, is_first=is_first)

    def start_average(self) -> Pending:
        """Start averaging over the replicas what `start_reduction` has added up since they did; nothing where none has.

        What they have averaged before is the same on each, and stays.

        Collective: the shards' replicas, where ``awaits_average``; else none.
        """
        if not self.awaits_average:
            return Pending()
        self._is_summed = False
        return self._start_average(self.format.master)

    def _start_average(self, wire: torch.dtype) -> Pending:
        """Start averaging the gradient over the replicas, which send it in a format."""
        self._use(Role.GRAD)
        gradient = self.make_gradient()
        source = gradient.to(self.format.device, wire)  # up to the device and down again is quicker than among hosts
        average = collectives.all_reduce(source, dist.ReduceOp.AVG, self.ranks.replica_group)

        def finish() -> None:
            if source is not gradient:
                gradient.copy_(source)
            self._end_use(Role.GRAD, changed=True)

        return Pending([average], finish)

    @functools.cached_property
    def _outgoing(self) -> GradientPacker:
        return GradientPacker(self.plan, self.format)

    def _start_sum(self, gradients: Mapping[int, Tensor], scratch: Tensor, *, is_first: bool) -> Pending:
        buffer, group, bounds = self._gradient, self.ranks.shard_group, self.plan.bounds
        assert buffer is not None, "made before it is added to"
        scale = 1.0 / (self.ranks.shard_size * self.ranks.num_shares * self.num_parts)
        if buffer.device.type != self.format.device.type:
            return self._start_sum_below(buffer, self._outgoing.joined(gradients), scale, is_first)
        self._use(Role.GRAD)
        if self.ranks.shard_size == 1:  # whose shard is the whole: nothing is joined, and nothing sent
            for offset, part in self._outgoing.parts(gradients):
                place = buffer.tensor[offset : offset + part.numel()]
                sum_into(place, [part], scale=scale, accumulate=not is_first)
            self._end_use(Role.GRAD, changed=True)
            return Pending()
        if self.format.device.type == "cpu":
            parts = self._outgoing.parts(gradients)
            if self.format.is_table:
                shapes = [parameter.shape for parameter in self.parameters]
                parts = [(at, part.view(shape)) for (at, part), shape in zip(parts, shapes, strict=True)]
            pending = collectives.reduce_scatter(
                parts, bounds, buffer.tensor, group, scale=scale, accumulate=not is_first, scratch=scratch
            )
        else:
            source = self._outgoing.joined(gradients)
            pending = collectives.reduce_scatter(
                source, bounds, buffer.tensor, group, scale=scale, accumulate=not is_first
            )
        return Pending([pending], lambda: self._end_use(Role.GRAD, changed=True)) if self.memory.moves else pending

    def _start_sum_below(self, buffer: FlatBuffer, source: Tensor, scale: float, is_first: bool) -> Pending:  # noqa: FBT001
        """Start adding to a gradient on the host: its copy begins as soon as the sum is there, and backward goes on."""
        num_bytes = self.numel * self.format.master.itemsize
        self.memory.reserve(num_bytes)
        stream = self.memory.copy_stream(self.format.device, up=False)
        with stream.after_compute():
            staged = torch.empty(self.numel, dtype=self.format.master, device=self.format.device)
            collectives.reduce_scatter(source, self.plan.bounds, staged, self.ranks.shard_group, scale=scale).wait()
            if self.numel:
                written = self.memory.write(buffer, staged, accumulate=not is_first)
            else:  # the sum of the others' slices still reads what this rank sends
                summed = stream.record()
                written = Pending(finish=None if summed is None else summed.wait)
        return Pending([written], lambda: self.memory.free(num_bytes), keep=source)

    # ---- steps

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Have everything in use such that the optimizer can step on the pieces, where its state is."""
        self._sent.wait()
        with contextlib.ExitStack() as stack:
            if self.memory.moves:
                if self.has_gradient:
                    self.make_gradient()
                stack.enter_context(self.in_use(*self._updated_roles(), Role.GRAD, changes=True))
                self._bring_whole_state()
            self.show_gradients()
            try:
                yield
            finally:
                self.hide_gradients()

    def _updated_roles(self) -> tuple[Role, ...]:
        """Return what the optimizer updates."""
        return (Role.OPTIM,) if self.has_copy else (Role.PARAM, Role.OPTIM)

    def show_gradients(self) -> None:
        """Give the pieces their gradients, those that no rank used none. All that is stepped on is in use."""
        self._sent.wait()
        for piece, gradient in self.used_pieces():
            piece.values.grad = gradient

    def hide_gradients(self) -> None:
        """Give the pieces no gradients."""
        for piece in self.pieces:
            piece.values.grad = None

    def take_assigned(self, names: Mapping[int, str]) -> None:
        """Bring back values to which the optimizer has given other memory, by ``parameter.data = ...``; all is in use.

        Args:
            names: The parameters' names, by number.

        Raises:
            ConfigError: If there are more or fewer than there should be.
        """
        itemsize = (self.format.master if self.has_copy else self.format.working).itemsize
        for piece in self.pieces:
            found, numel = piece.values, piece.stop - piece.start
            if not numel or found.data_ptr() == self.values.data_ptr() + piece.begin * itemsize:
                continue
            if found.numel() != numel:
                msg = (
                    f"The optimizer has assigned {found.numel()} values to `parameter.data` of a part of "
                    f"'{names[piece.index]}' that has {numel}. Write as many as there were."
                )
                raise ConfigError(msg)
            place = self.slice_of(self.values, piece)
            found.data = place.copy_(found.data.view(place.shape))

    def _bring_whole_state(self) -> None:
        """Move state that is not elementwise, and so in no buffer, to where the optimizer steps this time."""
        device = self.values.device
        for index, state in self._states.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    is_step_on_host = key == "step" and value.device.type == "cpu"
                    if not is_step_on_host and not is_elementwise(self.piece_of[index], key, value):
                        state[key] = value.to(device)

    def keep_state(self, states: Mapping[int, State]) -> None:
        """Take this bucket's elementwise optimizer state into its buffer, where its memory moves buffers.

        Args:
            states: By parameter, what the optimizer keeps; entries become views of the buffer.
        """
        if self.memory.moves:
            # A load brings them one by one.
            self._states.update({index: state for index, state in states.items() if index in self.piece_of})
            with self.in_use(*self._updated_roles(), changes=True):
                self._pack(self._states)

    def _pack(self, states: Mapping[int, State]) -> None:
        """Copy what the optimizer updates and its elementwise state into one buffer, if they are not in it."""
        entries = [
            (piece.index, key, value)
            for piece in self.pieces
            for key, value in states.get(piece.index, {}).items()
            if is_elementwise(piece, key, value) and value.numel()
        ]
        if self._is_packed(entries):
            return
        tensors = [value for _, _, value in entries]
        state_bytes = sum(map(_aligned_bytes, tensors))
        copy_bytes = _aligned_bytes(self.values) if self.format.has_copy else 0
        if not state_bytes + copy_bytes:
            return
        device = self.memory.step_device(self._number, state_bytes + copy_bytes, self.format.step_device)
        has_copy = self.format.has_copy or device.type != self.format.step_device.type
        if self.has_copy and not has_copy:  # its state came to the device for good
            with self.in_use(Role.PARAM, changes=True):
                self.own.copy_(self.values)
        kept = [self.values] if has_copy else []
        starts = list(itertools.accumulate(map(_aligned_bytes, [*kept, *tensors]), initial=0))
        made = FlatBuffer(
            self._number, Role.OPTIM, self.memory.zeros(starts[-1], torch.uint8, device, self.format.device)
        )
        for tensor, start in zip([*kept, *tensors], starts, strict=False):
            made.part(tensor, start).copy_(tensor)
        uses = 0 if self._optim is None else self._drop(self._optim)
        self._optim, self._packed, self.has_copy = made, entries, has_copy
        for tensor, start in zip(tensors, starts[len(kept) :], strict=False):
            made.add_view(tensor, start)
        self._follow_values()
        self._add(made, uses)

    def _is_packed(self, entries: Sequence[tuple[int, str, Tensor]]) -> bool:
        """Whether the buffer has just these tensors, and a copy of the values where it should."""
        if self._optim is None or Role.OPTIM not in self._uses:
            return False
        known = {(index, key): value for index, key, value in self._packed}
        needs_copy = self.format.has_copy or self._optim.device.type != self.format.step_device.type
        return (
            self.has_copy == needs_copy
            and len(known) == len(entries)
            and all(known.get((index, key)) is value for index, key, value in entries)
        )


@contextlib.contextmanager
def stepping_on(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Have the pieces of many buckets ready for one step; see `Bucket.stepping`."""
    with contextlib.ExitStack() as stack:
        for bucket in buckets:
            if bucket.memory.moves:
                stack.enter_context(bucket.stepping())
        shown = [bucket for bucket in buckets if not bucket.memory.moves]
        for bucket in shown:
            bucket.show_gradients()
        try:
            yield
        finally:
            for bucket in shown:
                bucket.hide_gradients()


def bit_sums(values: Tensor, block_numel: int = _BLOCK_NUMEL) -> Tensor:
    """Return two sums over the bits of 1-D values, shape ``(2,)``: one of them depends on where these are.

    Memory: three times so many words of 8 bytes as a block has.
    """
    words = values.detach().view(torch.int64)  # slices begin and end at words
    sums = torch.zeros(2, dtype=torch.int64, device=values.device)
    for start in range(0, len(words), block_numel):
        block = words[start : start + block_numel]
        places = torch.arange(start + 1, start + 1 + len(block), device=values.device)
        sums += torch.stack([block.sum(), (block * places).sum()])
    return sums


def _aligned_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a buffer, in which the next one begins at a multiple of 64."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _left(name: str, remedy: str) -> ConfigError:
    """Return the error for a parameter that does not have the bucket's memory any more."""
    return ConfigError(
        f"Parameter '{name}' was given other memory after `boost`, by `.data = ...`, `.to(...)` or the like. {remedy}"
    )


def _nobody() -> None:
    """Return ``None``, as the reference to an object that is gone does."""
