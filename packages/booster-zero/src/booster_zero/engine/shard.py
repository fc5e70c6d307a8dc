"""This rank's slice of a bucket: values, gradient and optimizer state, kept where its home keeps them.

Two ranks, three parameters; the cut falls into ``b``::

    all       |  a  a  a  a  .  |  b  b  b  b  b  b |  c  c  .  |
    rank 0    |<--------- slice of rank 0 --->|                       pieces: a, start of b
    rank 1                                    |<--- of rank 1 ------>|     pieces: rest of b, c

``values`` is what the optimizer updates: the slice in the working format, or a copy of it in another format (fp32
masters) or memory (the host). Tensors that others hold (pieces, entries of the optimizer's state) stay the same objects
wherever a home moves their memory: they are views of it while it can be computed with, and placeholders otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_runtime.collectives import Pending
from booster_runtime.sharding import ParameterPiece, is_cut
from booster_zero.engine.descent import Descent, EarlyGradient, lift
from booster_zero.engine.home import Role, zeros_in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_runtime.sharding import ShardingRanks, State
    from booster_zero.engine.home import Home
    from booster_zero.engine.partition import BucketPlan

_ALIGNMENT_BYTES = 64
_BLOCK_NUMEL = 1 << 20
"""Values are compared in blocks of this many elements, which need little memory."""
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Format:
    """The number formats of a parameter and the devices of its copies; parameters of one format share buckets.

    Args:
        working: Format that forward reads.
        master: Format that the optimizer updates.
        wire: Format in which gradients travel.
        device: Where forward runs.
        home: Where the optimizer steps.
        is_trained: Whether the parameter required a gradient when it was laid out.
        copies: The stages of a pipeline that hold a copy of the parameter each; empty where one stage has it. Buckets
            of the same copies must be laid out alike on each of the stages.
        ranks: The ranks that share the parameter, where they are others than those of the layout.
        is_table: Whether the parameter is large, and forward looks up some of its rows: only these have gradients.
        optimizer: Which of the model's optimizers steps on the parameter.
        partition: How that takes it: ``"flat"`` or ``"parameter"``, see `booster_zero.engine.partition`.
    """

    working: torch.dtype
    master: torch.dtype
    wire: torch.dtype
    device: torch.device
    home: torch.device
    is_trained: bool
    copies: tuple[int, ...] = ()
    ranks: ShardingRanks | None = None
    is_table: bool = False
    optimizer: int = 0
    partition: str = "flat"

    @property
    def has_copy(self) -> bool:
        """Whether the optimizer updates a copy instead of the working values."""
        return self.working != self.master or self.device != self.home


@dataclass(eq=False)
class BucketPiece(ParameterPiece):
    """The part of one parameter that this rank owns.

    Attributes:
        begin: Where the piece begins in this rank's slice of the bucket.
    """

    begin: int


def is_elementwise(piece: BucketPiece, key: str, value: Any) -> bool:
    """Return whether a part of an optimizer's state belongs to a piece element by element."""
    return isinstance(value, torch.Tensor) and is_cut(key, value, piece.values.shape)


class Shard:
    """What this rank owns of a bucket.

    Args:
        plan: Layout.
        parameters: The bucket's parameters, in the order of the plan.
        format: Formats and devices.
        ranks: The ranks that share the bucket.
        home: Keeps it.
        own: The slice in the working format, shape ``(length of the slice,)``.

    Attributes:
        own: As given, wherever it is now.
        values: What the optimizer updates; ``own`` itself where that has the right format and device.
        pieces: The parts of parameters that the slice is made of.
        piece_of: The same by the parameter's number.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        format: Format,  # noqa: A002 - the noun for it
        ranks: ShardingRanks,
        *,
        home: Home,
        own: Tensor,
    ) -> None:
        self.plan = plan
        self.parameters = parameters
        self.format = format
        self.ranks = ranks
        self.home = home
        self.own = own
        self.values = own
        if format.has_copy:
            self.values = zeros_in_memory(own.numel(), format.master, format.home, format.device)
        self.gradient: Tensor | None = None
        self.has_gradient = False
        self.pieces = list(self._cut())
        self.piece_of = {piece.index: piece for piece in self.pieces}
        self._used: Mapping[int, bool] = {}
        self._gradients: dict[int, Tensor] = {}  # slices of the gradient, as long as it stays where it is
        self._number = next(_numbers)
        self._uses: dict[Role, int] = {}  # of the blocks that a home may move
        self._states: dict[int, State] = {}
        self._packed: list[tuple[int, str, Tensor]] = []
        self._views: list[tuple[Tensor, int]] = []  # the optimizer's tensors, and where each begins in its block
        self._optim: Tensor | None = None
        self._steps_below = False  # the optimizer's state is on the host, the values on the device
        self._early: EarlyGradient | None = None
        self._descends_early = True
        self._descent: Descent | None = None

    def _cut(self) -> Iterator[BucketPiece]:
        rank = self.ranks.shard_rank
        for slot, parameter in zip(self.plan.slots, self.parameters, strict=True):
            owned = self.plan.owned(slot, rank)
            if owned is not None:
                begin = slot.offset + owned[0] - self.plan.bounds[rank]
                part = self.values[begin : begin + owned[1] - owned[0]]
                if part.numel() == slot.numel:
                    part = part.view(parameter.shape)
                values = nn.Parameter(part, part.is_floating_point())
                yield BucketPiece(slot.index, parameter, *owned, values, begin)

    def hand_to_home(self) -> None:
        """Let the home move values and masters, if it moves anything."""
        self._add(Role.PARAM, self.own)
        if self.format.has_copy and self.home.moves:
            self._pack({})

    @property
    def numel(self) -> int:
        """Number of elements of this rank's slice."""
        low, high = self.plan.bounds[self.ranks.shard_rank : self.ranks.shard_rank + 2]
        return high - low

    def slice_of(self, tensor: Tensor, piece: BucketPiece) -> Tensor:
        """Return a piece's part of a 1-D tensor that covers this rank's slice, in the shape of the piece's values."""
        return tensor[piece.begin : piece.begin + piece.stop - piece.start].view(piece.values.shape)

    # ---- use

    @contextlib.contextmanager
    def in_use(self, *roles: Role, changes: bool) -> Iterator[None]:
        """Have blocks where they can be computed with, for the block of code.

        Args:
            *roles: Which; none for all. Those that are not there are left out.
            changes: Whether the code writes to them.
        """
        present = [role for role in roles or Role if role in self._uses]
        for pending in [self._fetch(role) for role in present]:
            pending.wait()
        try:
            yield
        finally:
            for role in present:
                self._release(role, changed=changes)

    def free(self) -> None:
        """Give up all memory, because other buckets have taken this one's place; others may still hold the object."""
        for role in [*self._uses]:
            self._drop(role)
        self.gradient = None
        self._rebind_own(None)
        if self.format.has_copy:
            self._point(_placeholder(self.values))

    def _fetch(self, role: Role) -> Pending:
        if role not in self._uses:
            return Pending()
        self._uses[role] += 1
        if role is Role.GRAD and self._early is not None:
            self._early.precede()
        return self.home.fetch((self._number, role))

    def _release(self, role: Role, *, changed: bool) -> None:
        if role in self._uses:
            self._uses[role] -= 1
            self.home.release((self._number, role), changed=changed)

    def _add(self, role: Role, flat: Tensor) -> None:
        if not self.home.moves or not flat.numel():  # a rank may own nothing of a bucket
            return
        self._uses[role] = 0
        rebind = {Role.PARAM: self._rebind_own, Role.GRAD: self._rebind_gradient, Role.OPTIM: self._rebind_optim}
        self.home.add((self._number, role), flat, rebind[role])

    def _drop(self, role: Role) -> int:
        """Take a block from the home, and return how many uses of it were going on."""
        self.home.drop((self._number, role))
        return self._uses.pop(role)

    # ---- values

    def round_values(self) -> None:
        """Bring the slice in the working format up to date with what the optimizer updated. Both are in use."""
        if self.format.has_copy and self._steps_below and self.own.device != self.values.device:
            with self.home.lifting((self._number, Role.PARAM)):
                lift(self.own, self.values, pins=self.home.pins)
        elif self.format.has_copy:
            self.own.copy_(self.values)

    def take_working_values(self) -> None:
        """Bring the optimizer's values up to date with the slice in the working format. Both are in use.

        Where a master rounds to the working value that is there, it is the truer of the two, and stays.
        """
        if not self.format.has_copy:
            return
        for start in range(0, self.numel, _BLOCK_NUMEL):
            values = self.values[start : start + _BLOCK_NUMEL]
            own = self.own[start : start + _BLOCK_NUMEL].to(values.device)
            is_stale = values.to(own.dtype) != own
            values.copy_(torch.where(is_stale, own.to(values.dtype), values))

    def _rebind_own(self, flat: Tensor | None) -> None:
        self.own = _placeholder(self.own) if flat is None else flat
        if not self.format.has_copy:
            self._point(self.own)

    def _point(self, values: Tensor) -> None:
        """Let the optimizer's pieces be views of values in other memory."""
        self.values = values
        for piece in self.pieces:
            _assign(piece.values, self.slice_of(values, piece))

    # ---- gradient

    def make_gradient(self) -> Tensor:
        """Return this rank's gradient to be written to; zeros where there was none."""
        if self.gradient is None:
            self.gradient = zeros_in_memory(self.numel, self.format.master, self.format.home, self.format.device)
            self._gradients = {}
            self._add(Role.GRAD, self.gradient)
        self.has_gradient = True
        return self.gradient

    def drop_gradient(self) -> None:
        """Forget the gradient. Its memory is kept: asking for it again in each step takes longer than a sum."""
        if Role.GRAD in self._uses and self.has_gradient:
            self.home.forget((self._number, Role.GRAD))
        self._end_early()
        self.has_gradient = False
        for piece in self.pieces:
            piece.values.grad = None

    def zero_gradient(self) -> None:
        """Set the gradient to zero, where there is one."""
        if self.has_gradient and self.gradient is not None:
            with self.in_use(Role.GRAD, changes=True):
                self.gradient.zero_()

    def zero_gradient_of(self, index: int) -> None:
        """Set this rank's part of one parameter's gradient to zero, where there is one."""
        if self.has_gradient and self.gradient is not None:
            with self.in_use(Role.GRAD, changes=True):
                for piece in self.pieces:
                    if piece.index == index:
                        self.slice_of(self.gradient, piece).zero_()

    def note_used(self, used: Mapping[int, bool]) -> None:
        """Take note of which parameters were used: the optimizer leaves the others as they are."""
        self._used = used

    def used_pieces(self) -> list[tuple[BucketPiece, Tensor]]:
        """Return the pieces whose parameters were used, and their gradients. The block is in use."""
        if self.gradient is None or not self.has_gradient:
            return []
        used, gradients = self._used, self.gradients_by_parameter()
        return [(piece, gradients[piece.index]) for piece in self.pieces if used.get(piece.index)]

    def gradients_by_parameter(self) -> dict[int, Tensor]:
        """Return each piece's part of the gradient, in the shape of its values. The gradient is there, and in use."""
        if not self._gradients:
            assert self.gradient is not None, "asked for parts of a gradient that is not there"
            self._gradients = {piece.index: self.slice_of(self.gradient, piece) for piece in self.pieces}
        return self._gradients

    def _gradients_beside_values(self) -> list[tuple[BucketPiece, Tensor]]:
        """Return what `used_pieces` does, on the device of the pieces' values."""
        if self._descent is None:
            return self.used_pieces()
        below = self._descent.gradient
        return [] if below is None else [(piece, self.slice_of(below, piece)) for piece, _ in self.used_pieces()]

    def used_gradients(self) -> list[Tensor]:
        """Return the gradients of pieces whose parameters were used. The block is in use."""
        return [gradient for _, gradient in self.used_pieces() if gradient.numel()]

    def _rebind_gradient(self, flat: Tensor | None) -> None:
        assert self.gradient is not None, "a block that is kept has been made"
        self._gradients = {}
        self.gradient = _placeholder(self.gradient) if flat is None else flat

    # ---- optimizer state

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Have everything in use such that the optimizer can step on the pieces, where its state is."""
        with contextlib.ExitStack() as stack:
            if self.home.moves:
                self.start_descent()
                stack.callback(self.end_descent)
                stack.enter_context(self.in_use(*self._roles_of_step(), changes=True))
                stack.enter_context(self._beside_state())
                self._bring_whole_state()
            shown = self.show_gradients()
            try:
                yield
            finally:
                self.show_again(shown)

    def show_gradients(self) -> list[Tensor | None]:
        """Give the pieces their gradients, those that no rank used none, and return what to pass to `show_again`.

        All that the optimizer steps on is in use.
        """
        pieces = self.pieces
        shown = [piece.values.grad for piece in pieces]
        found = self._gradients_beside_values()
        if len(found) == len(pieces):
            for piece, gradient in found:
                piece.values.grad = gradient
            return shown
        gradients = {piece.index: gradient for piece, gradient in found}
        for piece in pieces:
            piece.values.grad = gradients.get(piece.index)
        return shown

    def show_again(self, shown: Sequence[Tensor | None]) -> None:
        """Give the pieces what they had for gradients before `show_gradients`."""
        for piece, before in zip(self.pieces, shown, strict=True):
            piece.values.grad = before

    def start_descent(self) -> None:
        """Start copying to the host what the optimizer needs there, if it steps there: `stepping` goes on from it."""
        if self._steps_below and self._descent is None:
            early = self._end_early()
            if early is not None and not early.is_of(self.gradient):
                early, self._descends_early = None, False  # as a script that clips does in each step
            self._descent = Descent(self, early)

    def _roles_of_step(self) -> tuple[Role, ...]:
        """Return which blocks a step uses where they are computed with: all but offloaded values."""
        return (*((Role.PARAM,) if self._descent is None else self._descent.roles), Role.GRAD, Role.OPTIM)

    def use_own_below(self, stack: contextlib.ExitStack) -> Tensor | None:
        """Use the working values on the host until a stack is closed; return ``None`` where they are not offloaded."""
        own = self.home.use_below((self._number, Role.PARAM)) if Role.PARAM in self._uses else None
        if own is not None:
            stack.callback(self.home.release_below, (self._number, Role.PARAM))
        return own

    def _end_early(self) -> EarlyGradient | None:
        early, self._early = self._early, None
        if early is not None:
            early.precede()
        return early

    def start_early_descent(self) -> None:
        """Start copying a gradient to the host that has just been reduced, unless an earlier copy went unused."""
        if self._steps_below and self._descends_early and self.ranks.replica_group is None:  # else it is averaged later
            self._early = EarlyGradient(self.make_gradient(), self.home)

    def end_descent(self) -> None:
        """Give up what `start_descent` has started."""
        descent, self._descent = self._descent, None
        if descent is not None:
            descent.end()

    @contextlib.contextmanager
    def _beside_state(self) -> Iterator[None]:
        """Have the pieces' values where the optimizer's state is. All blocks are in use."""
        if not self._steps_below:
            yield
            return
        own, descent = self.own, self._descent
        assert descent is not None, "started before the blocks were brought"
        descent.wait()
        if descent.own is not None:
            self._rebind_own(descent.own)
        elif descent.values is not None:
            self._point(descent.values)
        try:
            yield
        finally:
            if descent.values is not None:
                with self.home.lifting((self._number, Role.PARAM)):
                    lift(own, descent.values, pins=self.home.pins)
            self._rebind_own(own)

    def _bring_whole_state(self) -> None:
        """Move state that is not elementwise, and so in no block, to where the optimizer steps this time."""
        device = self.values.device
        for index, state in self._states.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    is_step_on_host = key == "step" and value.device.type == "cpu"
                    if not is_step_on_host and not is_elementwise(self.piece_of[index], key, value):
                        state[key] = value.to(device)

    def offload_state(self, states: Mapping[int, State]) -> None:
        """Move this bucket's elementwise optimizer state into a block, where its home moves blocks.

        Args:
            states: By parameter, what the optimizer keeps; entries are replaced.
        """
        if self.home.moves:
            # A load brings them one by one.
            self._states.update({index: state for index, state in states.items() if index in self.piece_of})
            with self.in_use(*self._roles_of_step(), changes=True):
                self._pack(self._states)

    def _pack(self, states: Mapping[int, State]) -> None:
        """Copy masters and elementwise state into one block, if they are not in it."""
        entries = [
            (piece.index, key, value)
            for piece in self.pieces
            for key, value in states.get(piece.index, {}).items()
            if is_elementwise(piece, key, value) and value.numel()
        ]
        known = {(index, key): value for index, key, value in self._packed}
        if Role.OPTIM in self._uses and len(known) == len(entries) and all(known.get(e[:2]) is e[2] for e in entries):
            return
        kept = [self.values] if self.format.has_copy else []
        tensors = [*kept, *(value for _, _, value in entries)]
        starts = list(itertools.accumulate((_aligned_bytes(tensor) for tensor in tensors), initial=0))
        if not starts[-1]:
            return
        device = tensors[0].device
        block = zeros_in_memory(starts[-1], torch.uint8, device, device)
        for tensor, start in zip(tensors, starts, strict=False):
            _view_in(block, tensor, start).copy_(tensor)
        uses = 0
        if Role.OPTIM in self._uses:
            for _ in range(self._uses[Role.OPTIM]):
                self.home.release((self._number, Role.OPTIM), changed=False)
            uses = self._drop(Role.OPTIM)
        self._packed = entries
        self._views = list(zip((value for _, _, value in entries), starts[len(kept) :], strict=False))
        self._rebind_optim(block)
        self._add(Role.OPTIM, block)
        for _ in range(uses):  # whoever had the old block in use has the new one in use
            self._fetch(Role.OPTIM).wait()

    def _rebind_optim(self, flat: Tensor | None) -> None:
        self._optim = flat
        if flat is not None:
            self._steps_below = self.home.moves and flat.device.type != self.format.device.type
        if self.format.has_copy:
            self._point(_placeholder(self.values) if flat is None else _view_in(flat, self.values, 0))
        for tensor, start in self._views:
            _assign(tensor, _placeholder(tensor) if flat is None else _view_in(flat, tensor, start))


@contextlib.contextmanager
def stepping_on(shards: Sequence[Shard]) -> Iterator[None]:
    """Have the pieces of many shards ready for one step; see `Shard.stepping`."""
    with contextlib.ExitStack() as stack:
        for shard in shards:
            if shard.home.moves:
                stack.enter_context(shard.stepping())
        shown = [(shard, shard.show_gradients()) for shard in shards if not shard.home.moves]
        try:
            yield
        finally:
            for shard, before in shown:
                shard.show_again(before)


def _assign(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor object have other memory, also of another device, to which ``.data`` can't always go."""
    if tensor.device.type == values.device.type:
        tensor.data = values
        return
    other = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _aligned_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a block, in which the next one begins at a multiple of 64."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _view_in(block: Tensor, like: Tensor, start: int) -> Tensor:
    """Return the part of a block of bytes that begins at ``start``, in the shape and format of another tensor."""
    end = start + like.numel() * like.element_size()
    return block[start:end].view(like.dtype).view(like.shape)


def _placeholder(like: Tensor) -> Any:
    """Return a tensor of the same shape, format and device that takes one element of memory."""
    filler = float("nan") if like.is_floating_point() else 0
    return torch.full((), filler, dtype=like.dtype, device=like.device).expand(like.shape)
