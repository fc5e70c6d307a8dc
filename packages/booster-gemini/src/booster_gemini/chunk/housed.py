"""What a rank keeps of a chunk, as blocks that may lie in any memory: slices of values, gradients, optimizer state.

Tensors that others hold (pieces, entries of the optimizer's state) stay the same objects wherever a block goes; they
are views of it while it is in memory, and placeholders while it is not.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_gemini.memory.disk import aligned_buffer
from booster_gemini.memory.home import Role
from booster_runtime.collectives import Pending
from booster_runtime.sharding import is_cut
from booster_zero.engine.bucket import ShardedBucket

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from torch import Tensor

    from booster_gemini.memory.home import Home
    from booster_runtime.sharding import ShardingRanks, State
    from booster_zero.engine.bucket import Format
    from booster_zero.engine.partition import BucketPlan

_ALIGNMENT_BYTES = 64
_numbers = itertools.count()


class HousedBucket(ShardedBucket):
    """This rank's part of a chunk.

    Args:
        plan: Layout.
        parameters: The model's parameters by number.
        format: Formats and places.
        ranks: The ranks that share the chunk.
        home: Keeps the blocks.
        valued: Numbers of the parameters whose values are taken; the others are zero at first.

    Attributes:
        shard: This rank's slice in the working format; ``values`` itself where the optimizer updates that.

    Collective: none; values are taken from this rank's parameters.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[int, nn.Parameter],
        format: Format,  # noqa: A002 - the noun for it
        ranks: ShardingRanks,
        *,
        home: Home,
        valued: Container[int],
    ) -> None:
        length = plan.bounds[ranks.shard_rank + 1] - plan.bounds[ranks.shard_rank]
        self.shard = _zeros(length, format.working, format.device)
        values = _zeros(length, format.master, format.device) if format.has_copy else self.shard
        super().__init__(plan, parameters, format, ranks, values)
        self.home = home
        self._number = next(_numbers)
        self._roles: set[Role] = set()
        self._uses: dict[Role, int] = dict.fromkeys(Role, 0)
        self._used: Mapping[int, bool] = {}
        self._views: list[tuple[Tensor, int]] = []  # what lies in the optimizer's block, from which byte
        self._packed: list[tuple[int, str, Tensor]] = []
        self._states: dict[int, State] = {}
        self._optim: Tensor | None = None
        taken = [piece for piece in self.pieces if piece.index in valued]
        for piece in taken:
            part = piece.parameter.data.reshape(-1)[piece.start : piece.stop]
            piece.values.data.copy_(part.view(piece.values.shape))
        if taken:
            self.take_up_values()
        self._add(Role.PARAM, self.shard)
        if format.has_copy and home.moves:
            self._pack({})

    @property
    def moves_values(self) -> bool:
        """Always: parameters hold no values outside of their use."""
        return True

    # ---- use

    @contextlib.contextmanager
    def in_use(self, *roles: Role, changes: bool) -> Iterator[None]:
        """Have blocks at hand for the block of code.

        Args:
            *roles: Which; those that are not there are left out.
            changes: Whether the code writes to them.
        """
        present = [role for role in roles if role in self._roles]
        for pending in [self._fetch(role) for role in present]:
            pending.wait()
        try:
            yield
        finally:
            for role in present:
                if role in self._roles:
                    self._release(role, changed=changes)

    def at_hand(self, *, changes: bool) -> contextlib.AbstractContextManager[None]:
        """Have everything at hand for a block of code."""
        return self.in_use(Role.PARAM, Role.GRAD, Role.OPTIM, changes=changes)

    def leave(self) -> None:
        """Let go of all blocks, because others have taken their place."""
        for role in [*self._roles]:
            self._drop(role)
        self._rebind_values(None)  # others may keep the chunk for a while, but need not keep its memory
        if self.format.has_copy:
            self._point(_placeholder(self.values))

    def _fetch(self, role: Role) -> Pending:
        if role not in self._roles:
            return Pending()
        self._uses[role] += 1
        return self.home.fetch((self._number, role))

    def _release(self, role: Role, *, changed: bool) -> None:
        if role not in self._roles:
            return
        self._uses[role] -= 1
        self.home.release((self._number, role), changed=changed)

    def _add(self, role: Role, flat: Tensor) -> None:
        if not flat.numel():  # a rank may own nothing of a chunk
            return
        self._roles.add(role)
        rebind = {Role.PARAM: self._rebind_values, Role.GRAD: self._rebind_gradient, Role.OPTIM: self._rebind_optim}
        self.home.add((self._number, role), flat, rebind[role])

    def _drop(self, role: Role) -> None:
        self._roles.discard(role)
        self.home.drop((self._number, role))

    # ---- values

    def take_up_values(self) -> None:
        """Bring the shard up to date with what the optimizer updated. Both are at hand."""
        if self.format.has_copy:
            self.shard.copy_(self.values)

    def take_working_values(self) -> None:
        """Bring the optimizer's values up to date with the shard's. Both are at hand.

        Where a master rounds to the working value that is there, it is the truer of the two, and stays.
        """
        if self.format.has_copy:
            own = self.shard.to(self.values.device)
            is_stale = self.values.to(own.dtype) != own
            self.values.copy_(torch.where(is_stale, own.to(self.values.dtype), self.values))

    def _rebind_values(self, flat: Tensor | None) -> None:
        self.shard = _placeholder(self.shard) if flat is None else flat
        if not self.format.has_copy:
            self._point(self.shard)

    def _point(self, values: Tensor) -> None:
        """Let the optimizer's pieces be views of values that lie elsewhere now."""
        self.values = values
        for piece in self.pieces:
            _assign(piece.values, self.slice_of(values, piece))

    # ---- gradients

    def make_gradient(self) -> Tensor:
        if self.gradient is None:
            self.gradient = _zeros(self.values.numel(), self.format.master, self.format.device)
            self._add(Role.GRAD, self.gradient)
        self.has_gradient = True
        return self.gradient

    def start_reduction(self, gradients: Mapping[int, Tensor], scratch: Tensor) -> Pending:
        is_first = not self.has_gradient
        self.make_gradient()
        self._fetch(Role.GRAD).wait()
        self.has_gradient = not is_first
        pending = super().start_reduction(gradients, scratch)
        return Pending([pending], lambda: self._release(Role.GRAD, changed=True))

    def drop_gradient(self) -> None:
        if Role.GRAD in self._roles and self.has_gradient:
            self.home.forget((self._number, Role.GRAD))
        super().drop_gradient()

    def show_gradient(self, used: Mapping[int, bool]) -> None:
        """Remember which parameters were used; where blocks stay in place, let the optimizer see their gradients."""
        self._used = used
        if not self.home.moves:
            super().show_gradient(used)

    def zero_gradient(self) -> None:
        with self.in_use(Role.GRAD, changes=True):
            super().zero_gradient()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of pieces whose parameters were used. The block is at hand."""
        if self.gradient is None or not self.has_gradient:
            return []
        return [
            self.slice_of(self.gradient, piece)
            for piece in self.pieces
            if self._used.get(piece.index) and piece.values.numel()
        ]

    def _rebind_gradient(self, flat: Tensor | None) -> None:
        assert self.gradient is not None, "a block that is kept has been made"
        self.gradient = _placeholder(self.gradient) if flat is None else flat

    # ---- optimizer state

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Have everything at hand such that the optimizer can step on the pieces, where its state lies."""
        with self.at_hand(changes=True):
            where = self.shard.device if self._optim is None else self._optim.device
            stays = self.format.has_copy or where == self.shard.device
            shard = self.shard
            if not stays:
                self._point(shard.to(where))
            assert self.gradient is not None, "the optimizer steps on chunks that have a gradient"
            gradient = self.gradient.to(where)
            for piece in self.pieces:
                piece.values.grad = self.slice_of(gradient, piece) if self._used.get(piece.index) else None
            try:
                yield
            finally:
                for piece in self.pieces:
                    piece.values.grad = None
                if not stays:
                    shard.copy_(self.values)
                    self._point(shard)

    def house(self, states: Mapping[int, State]) -> None:
        """Pack what the optimizer keeps of the pieces into the block of its state."""
        if self.home.moves:
            own = {piece.index: states[piece.index] for piece in self.pieces if piece.index in states}
            self._states.update(own)  # a load brings them one by one
            with self.at_hand(changes=True):
                self._pack(self._states)

    def _pack(self, states: Mapping[int, State]) -> None:
        entries = [
            (piece.index, key, value)
            for piece in self.pieces
            for key, value in states.get(piece.index, {}).items()
            if isinstance(value, torch.Tensor) and value.numel() and is_cut(key, value, piece.values.shape)
        ]
        known = {(index, key): value for index, key, value in self._packed}
        if Role.OPTIM in self._roles and len(known) == len(entries) and all(known.get(e[:2]) is e[2] for e in entries):
            return
        kept = [self.values] if self.format.has_copy else []
        tensors = [*kept, *(value for _, _, value in entries)]
        starts = list(itertools.accumulate((_aligned(tensor) for tensor in tensors), initial=0))
        if not starts[-1]:
            return
        block = _zeros(starts[-1], torch.uint8, tensors[0].device)
        for tensor, start in zip(tensors, starts, strict=False):
            _view(block, tensor, start).copy_(tensor)
        if Role.OPTIM in self._roles:
            for _ in range(self._uses[Role.OPTIM]):
                self.home.release((self._number, Role.OPTIM), changed=False)
            self._drop(Role.OPTIM)
        self._packed = entries
        self._views = list(zip((value for _, _, value in entries), starts[len(kept) :], strict=False))
        self._rebind_optim(block)
        self._add(Role.OPTIM, block)
        for _ in range(self._uses[Role.OPTIM]):  # who had the old block in use has the new one in use
            self.home.fetch((self._number, Role.OPTIM)).wait()

    def _rebind_optim(self, flat: Tensor | None) -> None:
        self._optim = flat
        if self.format.has_copy:
            self._point(_placeholder(self.values) if flat is None else _view(flat, self.values, 0))
        for tensor, start in self._views:
            _assign(tensor, _placeholder(tensor) if flat is None else _view(flat, tensor, start))


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose memory goes back to the system as soon as they are gone, which a C library's heap may keep."""
    if device.type != "cpu" or not numel:
        return torch.zeros(numel, dtype=dtype, device=device)
    num_bytes = numel * dtype.itemsize
    return aligned_buffer(num_bytes)[:num_bytes].view(dtype)


def _assign(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor object have other memory, also of another device, to which ``.data`` can't always go."""
    if tensor.device.type == values.device.type:
        tensor.data = values
        return
    other = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _view(block: Tensor, like: Tensor, start: int) -> Tensor:
    end = start + like.numel() * like.element_size()
    return block[start:end].view(like.dtype).view(like.shape)


def _placeholder(like: Tensor) -> Any:
    """Return a tensor of the same shape, format and device that takes one element of memory."""
    filler = float("nan") if like.is_floating_point() else 0
    return torch.full((1,), filler, dtype=like.dtype, device=like.device).expand(like.shape)
