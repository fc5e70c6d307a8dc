"""`ChunkMemory`: flat buffers that leave the memory where they are computed with while nobody uses them.

One plan a step says what moves when; what it did not foresee comes when it is needed. All calls come from the training
thread; the disk's threads touch nothing but bytes, and are waited for where a block is used or room is needed.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from booster_core.errors import OffloadError
from booster_gemini.memory.disk import DiskPlace
from booster_gemini.memory.ring import Copies, HostPlace, Ring, give_back_freed
from booster_gemini.plan import Schedule
from booster_runtime.collectives import Pending
from booster_zero.engine import Memory, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from booster_gemini.memory.disk import DiskStore
    from booster_gemini.plan import Moves, Placement
    from booster_runtime.memory import CopyStream
    from booster_zero.engine import FlatBuffer, Key


_MOST_LEAVING = 4
"""Blocks that are being written out at once where no budget says how much memory they may go on taking."""

_FREED_BYTES = 8 << 20
"""Bytes of values on their way to the disk after which the C library is asked for what it keeps of them."""


class State(enum.Enum):
    """What is where of a block: EMPTY -> HERE -> LEAVING -> AWAY -> COMING -> HERE, and EMPTY from anywhere."""

    EMPTY = "empty"
    """It has no values; the next use begins without."""
    HERE = "here"
    """It has a buffer with its values."""
    LEAVING = "leaving"
    """They are being written to its place; what the host computes with still has its buffer, and may stay."""
    AWAY = "away"
    """They are in its place."""
    COMING = "coming"
    """They are being read into its buffer."""


@dataclass(eq=False)
class Block:
    """What is known of one buffer.

    Attributes:
        owner: The buffer whose bytes they are.
        ring: The memory where it is used.
        dtype: Its format.
        state: What is where.
        buffer: Its bytes where it is used.
        place: Where it is while it is away, once it has been.
        is_saved: Whether the place has the present values.
        ready: The event after which the buffer can be used, of copies that were started.
        users: How many uses are going on.
        last_use: When the last one began.
    """

    owner: FlatBuffer
    ring: Ring
    dtype: torch.dtype
    num_bytes: int
    state: State = State.EMPTY
    buffer: Tensor | None = None
    place: HostPlace | DiskPlace | None = None
    is_saved: bool = False
    ready: torch.Event | None = None
    users: int = 0
    last_use: int = 0

    @property
    def flat(self) -> Tensor:
        """The values where they are used, in their format."""
        assert self.buffer is not None, "only what is here can be seen"
        return self.buffer[: self.num_bytes].view(self.dtype)

    @property
    def is_idle(self) -> bool:
        """Whether it is here, and not in use."""
        return self.state is State.HERE and not self.users


class ChunkMemory(Memory):
    """Keeps buffers on a device, in its host's memory and on a disk; without a device, in memory and on a disk.

    Args:
        device: Where forward runs.
        placement: Decides what is where.
        store: The disk, if blocks are there while they are away; else an accelerator's host has them.
        pins: Page-lock the host's memory.

    Attributes:
        top: The memory where forward runs, which a plan is made for.
        host: The host's; the same without an accelerator.
        copies: Between the two; ``None`` without an accelerator.
        store: As given.
    """

    moves = True

    def __init__(
        self,
        device: torch.device,
        placement: Placement,
        store: DiskStore | None = None,
        *,
        pins: bool = False,
    ) -> None:
        super().__init__()
        is_host = device.type == "cpu"
        self.copies = None if is_host else Copies(device)
        stream = None if self.copies is None else self.copies.up
        self.top = Ring(device, placement.budget_bytes, stream=stream)
        self.host = self.top if is_host else Ring(torch.device("cpu"), pins=pins)
        self.store = store
        self.pins = pins
        self._placement = placement
        self._schedule = Schedule(placement)
        self._blocks: dict[Key, Block] = {}
        self._moving: dict[Block, None] = {}  # those that the disk reads or writes
        self._wanted: deque[Key] = deque()
        self._leaves: set[Key] | None = None
        self._state_bytes: dict[Key, int] = {}  # of the optimizer's state, as `step_device` was asked
        self._clock = self._freed_bytes = 0

    def copy_stream(self, device: torch.device, *, up: bool) -> CopyStream:
        """Return the stream of all copies from the host to a device, or of all from it; see `Memory.copy_stream`."""
        if self.copies is None:
            return super().copy_stream(device, up=up)
        return self.copies.up if up else self.copies.down

    # ---- buffers

    def add(self, buffer: FlatBuffer) -> None:
        """Take over a buffer; see `Memory.add`. Where the disk is full it stays in memory, see `problem`."""
        key, flat = buffer.key, buffer.tensor
        assert key not in self._blocks, "a key names one block"
        ring = self.top if flat.device.type == self.top.device.type else self.host
        self._blocks[key] = block = Block(buffer, ring, flat.dtype, buffer.num_bytes)
        self._leaves = None
        if self.store is not None and (ring is not self.top or ring.budget_bytes is not None or self._leaves_now(key)):
            self._has_place(block)  # a full disk shows now, when nothing has moved there
        self._bring(block)
        self._arrive(block)
        block.flat.copy_(flat)
        if ring is self.top:
            self._advance(key, 1)
        self._end_use(block)
        if block.state is State.LEAVING:
            # The caller frees its values, of any sizes in turn, and glibc keeps nearly all of them otherwise.
            self._freed_bytes += block.num_bytes
            if self._freed_bytes >= _FREED_BYTES:
                self._freed_bytes = 0
                give_back_freed()

    def drop(self, buffer: FlatBuffer) -> None:
        """Forget a buffer altogether; what of it is in memory stays with those who have views of it."""
        block = self._blocks.pop(buffer.key)
        self._leaves = None
        self._empty(block, shows=True)
        if block.place is not None:
            block.place.drop()

    def step_device(self, number: int, num_bytes: int, preferred: torch.device) -> torch.device:
        """Return where a bucket's optimizer state is stepped on; see `Memory.step_device`.

        What is there stays where it is, unless more comes than a budget holds.
        """
        if self.top is self.host:
            return preferred
        key, budget = (number, Role.OPTIM), self.top.budget_bytes
        block = self._blocks.get(key)
        if block is not None and (budget is None or num_bytes <= block.num_bytes):
            return block.ring.device
        sizes = {**self._sizes(), key: num_bytes}
        if budget is not None:
            return self.host.device if sum(sizes.values()) > budget else self.top.device
        # Of state that takes more on the host, as asked: so each next one is judged alike.
        self._state_bytes[key] = num_bytes
        leaves = self._placement.leaving({each: self._state_bytes.get(each, size) for each, size in sizes.items()})
        return self.host.device if key in leaves else self.top.device

    def _sizes(self) -> Mapping[Key, int]:
        return {key: block.num_bytes for key, block in self._blocks.items()}

    def _fixed(self) -> frozenset[Key]:
        """Return the state that is stepped on a device, where it stays; see `step_device`."""
        return frozenset(
            key
            for key, block in self._blocks.items()
            if self.copies is not None and block.ring is self.top and key[1] is Role.OPTIM
        )

    def bytes_by_place(self) -> dict[str, int]:
        """Return how many bytes of blocks are where: by device type, and ``"disk"``."""
        places = {self.top.device.type: 0, "cpu": 0, **({"disk": 0} if self.store is not None else {})}
        for block in self._blocks.values():
            if block.buffer is not None:
                places[block.ring.device.type] += block.num_bytes
            elif block.place is not None and block.state is not State.EMPTY:
                places[block.place.name] += block.num_bytes
        return places

    # ---- uses

    def fetch(self, buffer: FlatBuffer) -> Pending:
        """Begin a use of a buffer; see `Memory.fetch`."""
        return Pending(finish=partial(self._arrive, self._begin_use(buffer)))

    def _begin_use(self, buffer: FlatBuffer) -> Block:
        block = self._blocks[buffer.key]
        if block.ring is self.top:
            self._advance(buffer.key, 1)
        block.users += 1
        self._clock += 1
        block.last_use = self._clock
        try:
            if block.state is State.LEAVING:
                self._finish_leaving(block, stays=True)
            if block.buffer is None:
                self._bring(block)
        except BaseException:
            block.users -= 1
            raise
        return block

    def _arrive(self, block: Block, *, waits: bool = True) -> None:
        """Show where a block is that is in use, once its values are; what copies them need not wait for copies."""
        if block.state is State.COMING:
            self._finish_coming(block)
        if waits and block.ready is not None:
            ready, block.ready = block.ready, None
            ready.wait() if block.ring is self.top else ready.synchronize()
        assert block.buffer is not None, "what is in use is here"
        if block.owner.tensor.data_ptr() != block.buffer.data_ptr():
            block.owner.point(block.flat)

    def release(self, buffer: FlatBuffer, *, changed: bool) -> None:
        """End a use; see `Memory.release`."""
        block = self._blocks[buffer.key]
        block.users -= 1
        if changed:
            block.is_saved = False
        self._end_use(block)

    def _end_use(self, block: Block) -> None:
        """Note the end of a use; a block that no plan sends away later leaves now, if it may not stay.

        The host beneath a device follows no plan: what has its place on the disk goes there.
        """
        is_planned = block.ring is self.top and self._advance(block.owner.key, -1)
        if block.is_idle and not is_planned and (block.ring is not self.top or self._leaves_now(block.owner.key)):
            self._leave(block)

    def _leaves_now(self, key: Key) -> bool:
        """Whether a block leaves after each use that no plan has, as in the first step, and in evaluation."""
        if self._leaves is None:
            self._leaves = self._placement.leaving(self._sizes()) - self._fixed()
        return key in self._leaves

    def forget(self, buffer: FlatBuffer) -> None:
        """Give up a buffer's values; see `Memory.forget`."""
        block = self._blocks[buffer.key]
        if block.ring is self.top:
            self._advance(buffer.key, 0)
        self._empty(block)

    def write(self, buffer: FlatBuffer, values: Tensor, *, accumulate: bool = False) -> Pending:
        """Start setting a buffer, or adding to it, from values of another device; see `Memory.write`.

        The host waits for no copy. What computes next on the device waits where it has to.
        """
        assert self.copies is not None, "values come from another device than forward's"
        block = self._blocks[buffer.key]
        if block.ring is not self.top:
            self._arrive(self._begin_use(buffer), waits=False)
            block.ready = sent = self.copies.hand_down(buffer.tensor, values, block.ready, accumulate=accumulate)
            self.release(buffer, changed=True)
            return Pending(finish=None if sent is None else sent.wait, keep=values)
        place, is_away = block.place, block.state is State.AWAY or self._leaves_now(buffer.key)
        if isinstance(place, HostPlace) and not block.users and block.is_saved and is_away:
            self._empty(block)  # it comes from the host for its next use
            place.values(block.dtype).copy_(values)
            block.state, block.is_saved = State.AWAY, True
            return Pending()
        self._arrive(self._begin_use(buffer))
        staged = None
        if values.dtype != block.dtype:
            staged = self.host.take(block.num_bytes)
            values = staged[: block.num_bytes].view(block.dtype).copy_(values)
        self.copies.up.wait_for_compute()
        block.ready = copied = self.copies.bring(block.flat, values)
        self.release(buffer, changed=True)
        if staged is None:
            return Pending(finish=None if copied is None else copied.synchronize, keep=values)
        self.host.give(staged, block.num_bytes, copied)
        return Pending()  # the values themselves are free

    def reserve(self, num_bytes: int) -> None:
        """Count memory that is taken for something else; see `Memory.reserve`."""
        self._advance(None, num_bytes)
        self._make_room(num_bytes)
        self.top.count(num_bytes)

    def free(self, num_bytes: int) -> None:
        """Count reserved memory as given back."""
        self._advance(None, -num_bytes)
        self.top.count(-num_bytes)

    def moment(self, name: str) -> None:
        """Say what the model is doing."""
        self._schedule.moment = name

    def end_step(self) -> None:
        """Make a plan for the next step from what this one was.

        Raises:
            BudgetError: If the budget can't hold what was in use at once.
        """
        self._start_moves(self._schedule.finish())
        mine = {key: block for key, block in self._blocks.items() if block.ring is self.top}
        here = frozenset(key for key, block in mine.items() if block.state in (State.HERE, State.COMING))
        below = frozenset(key for key, block in mine.items() if block.state in (State.AWAY, State.LEAVING))
        self._wanted.clear()
        sizes = {key: block.num_bytes for key, block in mine.items()}
        self._start_moves([self._schedule.end_step(sizes, here, below, self._fixed())])
        for ring in {self.top, self.host}:
            ring.end_step()
        if self.top is self.host and self.store is not None and not self._schedule.is_settled:
            # Laying out and first states leave much behind; later steps use again what the ones before have freed.
            give_back_freed()

    def close(self) -> None:
        """Give everything back."""
        if self.copies is not None:
            self.copies.synchronize()
        for block in self._blocks.values():
            if block.place is not None:
                block.place.abandon()
            block.owner.point(None)
        self._blocks.clear()
        self._moving.clear()
        for ring in (self.top, self.host):
            ring.clear()
        if self.store is not None:
            self.store.close()

    # ---- moves

    def _advance(self, key: Key | None, change: int) -> bool:
        """Note an event, and start what the plan says; return whether it has this event."""
        moves = self._schedule.note(key, change)
        self._start_moves(moves or ())
        return moves is not None

    def _start_moves(self, moves: Iterable[Moves]) -> None:
        for each in moves:
            for key in each.leave:
                if (block := self._blocks.get(key)) is not None and block.is_idle:
                    self._leave(block)
            self._wanted.extend(each.come)
        self._bring_wanted()

    def _bring_wanted(self) -> None:
        """Start bringing what the plan wants to be here, as far as those who leave have made room."""
        if self._wanted and self._moving:
            self._collect()
        while self._wanted:
            block = self._blocks.get(self._wanted[0])
            if block is not None and block.state is State.LEAVING and not block.users:
                return  # once it is written, it is kept or read back
            if block is not None and block.state is State.AWAY and not block.users:
                self._give_way(block)
                if not self.top.has(block.num_bytes):
                    return
                self._bring(block)
            self._wanted.popleft()

    def _give_way(self, wanted: Block) -> None:
        """Send blocks away that are needed later than one that is wanted, as far as it needs room; wait for none."""
        missing = wanted.num_bytes - sum(block.num_bytes for block in self._moving if block.state is State.LEAVING)
        if self.top.has(missing):
            return
        next_use = self._schedule.next_use
        later = {
            each: next_use(each.owner.key) for each in self._blocks.values() if each.ring is self.top and each.is_idle
        }
        for block in sorted(later, key=lambda block: -later[block]):
            if self.top.has(missing) or later[block] <= next_use(wanted.owner.key):
                return
            self._leave(block)
            if block.state is State.LEAVING:
                missing -= block.num_bytes

    def _bring(self, block: Block) -> None:
        """Give a block a buffer, and start filling it if it has values."""
        if block.ring is self.top:
            self._make_room(block.num_bytes)
        block.buffer = block.ring.take(block.num_bytes)
        if block.state is State.EMPTY:
            block.state = State.HERE
            # Its memory may still be copied away for the block that had it before.
            block.ready = self.copies.up.record() if self.copies is not None and block.ring is self.top else None
            return
        assert block.place is not None, "what is away is somewhere"
        block.place.bring(block.buffer)
        block.state = State.COMING
        if isinstance(block.place, HostPlace):
            self._finish_coming(block)
        else:
            self._moving[block] = None

    def _finish_coming(self, block: Block) -> None:
        """Wait for what the disk reads; what is used on a device is copied there then."""
        assert block.place is not None, "what comes was somewhere"
        self._moving.pop(block, None)
        block.ready = block.place.settle()
        block.state = State.HERE

    def _leave(self, block: Block) -> None:
        """Start moving a block that is not in use to its place, if it has or gets one."""
        if not self._has_place(block):
            return
        place = block.place
        assert place is not None
        assert block.buffer is not None, "only what is here can leave"
        if not place.keeps_buffer or block.ring.budget_bytes is None:
            self._bound_leaving()
        block.owner.point(None)
        if not block.is_saved:
            place.send(block.buffer, block.ready)
            block.is_saved = True
        if place.is_done:
            block.state = State.AWAY
        else:
            block.state = State.LEAVING
            self._moving[block] = None
        if not (block.state is State.LEAVING and place.keeps_buffer):
            self._free(block)

    def _has_place(self, block: Block) -> bool:
        """Return whether a block has a place to leave for, and find one if there is any."""
        if block.place is not None:
            return True
        copies = self.copies if block.ring is self.top else None
        if self.store is None:
            block.place = None if copies is None else HostPlace(block.num_bytes, self.host, copies)
            return copies is not None
        try:
            block.place = DiskPlace(block.num_bytes, self.store, self.host, copies)
        except OffloadError as error:
            self._problem = self._problem or error
        return block.place is not None

    def _finish_leaving(self, block: Block, *, stays: bool = False) -> None:
        """Wait until a block is in its place; it is still here where it stays, or where it could not be written."""
        assert block.place is not None, "what leaves has a place"
        self._moving.pop(block, None)
        try:
            block.place.settle()
        except OffloadError as error:  # the buffer stays, or the copy on the host: nothing is lost
            self._problem = self._problem or error
            block.is_saved, stays = False, True
        if block.buffer is None:
            block.state = State.AWAY
        elif stays:
            block.state = State.HERE
        else:
            block.state = State.AWAY
            self._free(block)

    def _bound_leaving(self) -> None:
        """Wait until few enough blocks are leaving, the least recently used first."""
        leaving = sorted((b for b in self._moving if b.state is State.LEAVING), key=lambda block: block.last_use)
        for block in leaving[: max(len(leaving) - _MOST_LEAVING + 1, 0)]:
            self._finish_leaving(block)

    def _collect(self) -> None:
        """Take the memory of blocks that have left, and go on with those that have come half of the way."""
        for block in [*self._moving]:
            assert block.place is not None, "what moves has a place"
            if block.place.is_done and block.state is State.LEAVING:
                self._finish_leaving(block, stays=block.owner.key in self._wanted)
            elif block.place.is_done:
                try:
                    self._finish_coming(block)
                except OffloadError as error:  # its use raises, too
                    self._problem = self._problem or error

    def _make_room(self, num_bytes: int) -> None:
        """Send blocks away until so many bytes are left; where nothing can go, the budget is exceeded for now.

        The least budget that would do is known at the end of the step, and the error then says it.
        """
        if self.top.has(num_bytes):
            return
        self._collect()
        mine = [block for block in self._blocks.values() if block.ring is self.top and not block.users]
        mine.sort(key=lambda block: (-self._schedule.next_use(block.owner.key), block.last_use))
        # What leaves anyway, what is not in use, and what comes before it is needed: the disk still has its values.
        for state in (State.LEAVING, State.HERE, State.COMING):
            for block in mine:
                if self.top.has(num_bytes):
                    return
                if block.state is not state:
                    continue
                if state is State.HERE:
                    self._leave(block)
                if block.state is State.LEAVING and block.buffer is not None:
                    self._finish_leaving(block)
                elif state is State.COMING and block.is_saved:
                    self._empty(block)
                    block.state, block.is_saved = State.AWAY, True

    def _empty(self, block: Block, *, shows: bool = False) -> None:
        """Give up a block's buffer and its values, and whatever moves them; views may go on showing them."""
        self._moving.pop(block, None)
        if block.place is not None:
            block.place.abandon()
        if not shows:
            block.owner.point(None)
        if block.buffer is not None:
            self._free(block)
        block.state, block.is_saved = State.EMPTY, False

    def _free(self, block: Block) -> None:
        """Give a block's buffer back."""
        buffer, block.buffer = block.buffer, None
        ready, block.ready = block.ready, None
        assert buffer is not None, "only what is here can be freed"
        if block.ring is self.top and self.copies is not None:
            self.copies.leave(buffer)
        block.ring.give(buffer, block.num_bytes, ready)
