"""Flat buffers over a list of memories: device, host, disk, of which there are two or three.

Their blocks are moved as a plan says, which a placement policy makes from the record of the last step; what the plan
did not foresee is fetched when it is needed. The disk is read and written during computation. All calls come from the
training thread; the disk's threads touch nothing but bytes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from booster_core.errors import OffloadError
from booster_gemini.memory.block import Block, bytes_by_place
from booster_gemini.memory.recorder import StepRecorder
from booster_gemini.memory.tiers import give_back_freed
from booster_gemini.placement.policy import Event, Kind
from booster_runtime.collectives import Pending
from booster_zero.engine import Memory, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor

    from booster_gemini.memory.copies import HostCopies
    from booster_gemini.memory.disk import DiskStore
    from booster_gemini.memory.record_file import MemoryRecord
    from booster_gemini.memory.tiers import Tier
    from booster_gemini.placement.policy import Moves, PlacementPolicy
    from booster_runtime.memory import CopyStream
    from booster_zero.engine import FlatBuffer, Key


_MOST_LEAVING = 4
"""Blocks that are being written out at once where no budget says how much memory they may go on taking."""

_FREED_BYTES = 8 << 20
"""Bytes of values on their way to the disk after which the C library is asked for what it keeps of them."""


class TieredMemory(Memory):
    """Keeps buffers in several memories: an accelerator's, its host's and a disk, or the host's and a disk.

    Args:
        tiers: The device's memory (the host's, where the host computes), and the host's beneath it, if there is one.
        copies: Copies between these two.
        store: The disk, if it is used.
        policy: Decides what is where.
        record: Where to write what happens, for pictures.

    Attributes:
        tiers: As given.
        store: As given.
    """

    moves = True

    def __init__(
        self,
        tiers: list[Tier],
        store: DiskStore | None,
        policy: PlacementPolicy,
        record: MemoryRecord | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        super().__init__()
        self.tiers = tiers
        self.store = store
        self.pins = tiers[-1].pins
        self._policy = policy
        self._record = record
        self._blocks: dict[Key, Block] = {}
        self._state_bytes: dict[Key, int] = {}  # of the optimizer's state, as `step_device` was asked
        self._recorder = StepRecorder(policy)
        self._clock = 0
        self._wanted: deque[Key] = deque()
        self._copies = copies
        self._landing: list[tuple[int, Tensor, torch.Event | None]] = []
        self._freed_bytes = 0
        self._stays: dict[Key, bool] = {}  # of the blocks that there are, as far as it was asked for

    def copy_stream(self, device: torch.device, *, up: bool) -> CopyStream:
        """Return the stream of all copies from the host to a device, or of all from it; see `Memory.copy_stream`."""
        if self._copies is None:
            return super().copy_stream(device, up=up)
        return self._copies.up if up else self._copies.down

    # ---- buffers

    def add(self, buffer: FlatBuffer) -> None:
        """Take over a buffer; see `Memory.add`. Where the disk is full it stays in memory, see `problem`."""
        key, flat = buffer.key, buffer.tensor
        assert key not in self._blocks, "a key names one block"
        self._stays.clear()
        tier = next(each for each in self.tiers if each.device.type == flat.device.type)
        block = Block(buffer, flat.numel(), flat.dtype, buffer.num_bytes, tier)
        self._blocks[key] = block
        if self._may_leave(block):
            self._allocate(block)  # a full disk shows now, when nothing has moved there
        self._make_room(block.tier, block.num_bytes)
        block.buffer = block.tier.take(block.num_bytes)
        self._fill(block, None)
        self._arrive(block)
        block.flat.copy_(flat)
        self._advance(Event(Kind.USE, key))
        self._advance(Event(Kind.RELEASE, key))
        self._leave_if_it_may_not_stay(block)
        if block.going is not None:
            # The caller frees its values, of any sizes in turn, and glibc keeps nearly all of them otherwise.
            self._freed_bytes += block.num_bytes
            if self._freed_bytes >= _FREED_BYTES:
                self._freed_bytes = 0
                give_back_freed()

    def step_device(self, number: int, num_bytes: int, preferred: torch.device) -> torch.device:
        """Return where a bucket's optimizer state is stepped on; see `Memory.step_device`.

        What is there stays where it is, unless more comes than a budget holds.
        """
        if len(self.tiers) == 1:
            return preferred
        key = number, Role.OPTIM
        block, budget = self._blocks.get(key), self.tiers[0].budget_bytes
        if block is not None and (budget is None or num_bytes <= block.num_bytes):
            return block.tier.device
        sizes = {**self.sizes(), key: num_bytes}
        # Of state that takes more on the host, as asked: so each next one is judged alike.
        self._state_bytes[key] = num_bytes
        asked = {other: self._state_bytes.get(other, size) for other, size in sizes.items()}
        if not self._policy.may_stay(key, asked) or (budget is not None and sum(sizes.values()) > budget):
            return self.tiers[1].device
        return self.tiers[0].device

    def _may_leave(self, block: Block) -> bool:
        """Return whether a block may ever go to the disk."""
        if self.store is None:
            return False
        if block.tier is self.tiers[0] and len(self.tiers) > 1:
            return self.tiers[1].budget_bytes is not None
        return block.tier.budget_bytes is not None or not self._policy.may_stay(block.key, self.sizes())

    def sizes(self) -> Mapping[Key, int]:
        """Return the size of every block, in bytes, in the order in which they were made."""
        return {key: block.num_bytes for key, block in self._blocks.items()}

    def bytes_by_place(self) -> dict[str, int]:
        """Return how many bytes of blocks are where: by device type, and ``"disk"``."""
        return bytes_by_place(self._blocks.values(), self.tiers, has_disk=self.store is not None)

    def _places(self) -> dict[Key, tuple[str, int]]:
        """Return where each block is, or that it is on its way, and its size."""
        lower = self.tiers[-1].device.type if len(self.tiers) > 1 else "disk"
        return {key: (block.place(lower), block.num_bytes) for key, block in self._blocks.items()}

    def drop(self, buffer: FlatBuffer) -> None:
        """Forget a buffer altogether; what of it is in memory stays with those who have views of it."""
        self._stays.clear()
        block = self._blocks.pop(buffer.key)
        block.is_bound = False
        self._empty(block)
        if block.offset is not None and self.store is not None:
            self.store.free(block.offset, block.num_bytes)

    # ---- uses

    def fetch(self, buffer: FlatBuffer) -> Pending:
        """Begin a use of a buffer; see `Memory.fetch`."""
        block = self._blocks[buffer.key]
        self._advance(Event(Kind.USE, buffer.key))
        block.users += 1
        self._clock += 1
        block.last_use = self._clock
        try:
            if block.going is not None:
                self._take_back(block)
            if not block.is_here:
                self._bring(block)
        except BaseException:
            block.users -= 1
            raise
        return Pending(finish=lambda: self._arrive(block))

    def _arrive(self, block: Block) -> None:
        """Wait for a block that is in use, and show where it is."""
        if block.coming is not None:
            self._finish_coming(block)
        if block.ready is not None:
            ready, block.ready = block.ready, None
            ready.wait()
        if not block.is_bound:
            block.is_bound = True
            block.owner.point(block.flat)

    def release(self, buffer: FlatBuffer, *, changed: bool) -> None:
        """End a use; see `Memory.release`."""
        block = self._blocks[buffer.key]
        block.users -= 1
        if changed:
            block.is_saved = False
            block.has_values = True
        self._advance(Event(Kind.RELEASE, buffer.key))
        self._leave_if_it_may_not_stay(block)

    def write(self, buffer: FlatBuffer, values: Tensor, *, accumulate: bool = False) -> Pending:
        """Start setting a buffer, or adding to it; see `Memory.write`. What is on the host is written to there."""
        block = self._blocks[buffer.key]
        if values.device.type != "cpu" or not self._is_on_device(block) or not self._is_used_below(block):
            return super().write(buffer, values, accumulate=accumulate)
        self._unbind(block)
        self._drop(block)
        block.flat_below().copy_(values)
        return Pending()

    def _is_used_below(self, block: Block) -> bool:
        """Whether the host has a block's values, which leave the device after each use."""
        key = block.key
        if key not in self._stays:
            self._stays[key] = self._policy.may_stay(key, self.sizes())
        return not self._stays[key] and block.is_below

    def note_arrival(self, buffer: FlatBuffer, event: torch.Event | None) -> None:
        """Let the next use of a buffer on a device come after a copy; see `Memory.note_arrival`."""
        self._blocks[buffer.key].ready = event

    def _leave_if_it_may_not_stay(self, block: Block) -> None:
        if not block.users and block.is_here and not self._recorder.has_plan and block.tier is self.tiers[0]:
            self._bring_wanted()
            if not self._policy.may_stay(block.key, self.sizes()):
                self._send_away(block)
        elif not block.users and block.is_here and block.tier is not self.tiers[0] and not block.tier.has(0):
            self._send_away(block)  # the host beneath a device follows no plan: what does not fit goes on to the disk

    def forget(self, buffer: FlatBuffer) -> None:
        """Give up a buffer's values; see `Memory.forget`."""
        block = self._blocks[buffer.key]
        self._advance(Event(Kind.FORGET, buffer.key))
        self._empty(block)
        block.has_values = block.is_saved = False

    def reserve(self, num_bytes: int) -> None:
        """Count memory that is taken for something else; see `Memory.reserve`."""
        self._advance(Event(Kind.RESERVE, None, num_bytes))
        self._make_room(self.tiers[0], num_bytes)
        self.tiers[0].count(num_bytes)

    def free(self, num_bytes: int) -> None:
        """Count reserved memory as given back."""
        self._advance(Event(Kind.FREE, None, num_bytes))
        self.tiers[0].count(-num_bytes)

    def moment(self, name: str) -> None:
        """Say what the model is doing."""
        self._recorder.moment = name
        if self._record is not None:
            self._record.moment(name)

    def end_step(self) -> None:
        """Make a plan for the next step from the record of this one.

        Raises:
            BudgetError: If the budget can't hold what was in use at once.
        """
        self._start_moves(self._recorder.finish())
        tier = self.tiers[0]
        mine = {key: block.num_bytes for key, block in self._blocks.items() if block.tier is tier}
        here = frozenset(key for key in mine if self._blocks[key].is_here)
        away = frozenset(key for key in mine if key not in here and self._blocks[key].has_values)
        has_chosen = len(self.tiers) > 1  # see `step_device`
        staying = frozenset(key for key in mine if has_chosen and key[1] is Role.OPTIM)
        self._wanted.clear()
        self._start_moves([self._recorder.end_step(mine, here, away, tier.budget_bytes, staying)])
        for each in self.tiers:
            each.end_step()
        if tier.device.type == "cpu" and self.store is not None and not self._recorder.is_settled:
            # Laying out and first states leave much behind; later steps use again what the ones before have freed.
            give_back_freed()
        if self._record is not None:
            self._note_record()
            self._record.end_step(self._recorder.num_unplanned)

    def close(self) -> None:
        """Give everything back."""
        if self._copies is not None:
            self._copies.synchronize()
        for block in self._blocks.values():
            for transfer in (block.coming, block.going):
                if transfer is not None:
                    transfer.abandon()
            block.owner.point(None)
        self._blocks.clear()
        for tier in self.tiers:
            tier.clear()
        if self.store is not None:
            self.store.close()
        if self._record is not None:
            self._record.close()

    # ---- moves

    def _advance(self, event: Event) -> None:
        """Note an event, and start what the plan says."""
        planned = event.key is None or self._is_planned(event.key)
        self._start_moves(self._recorder.note(event, is_planned=planned))
        if self._record is not None:
            self._note_record()

    def _note_record(self) -> None:
        assert self._record is not None, "asked for by whoever records"
        self._record.note(self._places(), self.tiers[0].used_bytes, self.tiers[0].held_bytes)

    def _start_moves(self, moves: Iterable[Moves]) -> None:
        for each in moves:
            for key in each.evict:
                block = self._blocks.get(key)
                if block is not None and block.is_here and not block.users and block.coming is None:
                    self._send_away(block)
            self._wanted.extend(each.load)
        self._bring_wanted()

    def _bring_wanted(self) -> None:
        """Start bringing what the plan wants to be here, as far as those who leave have made room."""
        if not self._wanted:
            return
        self._collect()
        while self._wanted:
            block = self._blocks.get(self._wanted[0])
            if block is not None and block.has_values and block.buffer is None and not block.users:
                if not block.tier.has(block.num_bytes):
                    return
                self._bring(block)
            self._wanted.popleft()

    def _is_planned(self, key: tuple[int, Role]) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.tier is self.tiers[0]

    def _bring(self, block: Block) -> None:
        """Start bringing a block to where it is used."""
        if block.going is not None:
            self._take_back(block)
        self._make_room(block.tier, block.num_bytes)
        block.buffer = block.tier.take(block.num_bytes)
        if not block.has_values or block.below is not None or block.offset is None:
            self._fill(block, block.below if block.has_values else None)
            return
        assert self.store is not None, "a region is on a disk"
        if not self._is_on_device(block):
            block.coming = self.store.read(block.offset, block.buffer)
        else:
            block.staged = self.tiers[-1].take(block.num_bytes)
            block.coming = self.store.read(block.offset, block.staged)

    def _is_on_device(self, block: Block) -> bool:
        return self._copies is not None and block.tier is self.tiers[0]

    def _fill(self, block: Block, source: Tensor | None) -> None:
        """Start copying what the host has of a block to the device, if it is used there, and if there is anything."""
        if self._copies is not None and self._is_on_device(block):
            assert block.buffer is not None, "taken before it is filled"
            block.ready = self._copies.bring(block.buffer, None if source is None else source[: block.num_bytes])
            block.copied = block.ready

    def _finish_coming(self, block: Block) -> None:
        """Wait for what is read from the disk; what is used on a device is copied there then."""
        assert block.coming is not None, "asked for one that is being read"
        coming, block.coming = block.coming, None
        coming.wait()
        if block.staged is not None:
            staged, block.staged = block.staged, None
            self._fill(block, staged)
            self._landing.append((block.num_bytes, staged, block.ready))

    def _send_away(self, block: Block) -> None:
        """Start moving a block that is not in use to the next memory."""
        assert block.buffer is not None, "only what is here can leave"
        lower = self.tiers[1] if len(self.tiers) > 1 and block.tier is self.tiers[0] else None
        if lower is None and self.store is None:
            return
        if block.tier.budget_bytes is None:
            self._bound_leaving(_MOST_LEAVING - 1)
        self._unbind(block)
        if not block.has_values or block.is_saved:
            self._drop(block)
            return
        if lower is not None and (self.store is None or block.below is not None or lower.has(block.num_bytes)):
            if block.below is None:
                block.below = lower.take(block.num_bytes)
            self._send_down(block, block.below)
            block.is_saved = True
            return
        assert self.store is not None, "the last memory is a disk"
        offset = self._allocate(block) if block.offset is None else block.offset
        if offset is None:
            return
        if not self._is_on_device(block):
            block.going = self.store.write(offset, block.buffer)
            return
        self._bound_leaving(_MOST_LEAVING - 1)
        block.staged = self.tiers[-1].take(block.num_bytes)
        sent = self._send_down(block, block.staged)
        block.going = self.store.write(offset, block.staged, after=None if sent is None else sent.synchronize)

    def _send_down(self, block: Block, target: Tensor) -> torch.Event | None:
        """Start copying a block from the device, whose buffer others may have from then on."""
        assert self._copies is not None, "only what is on a device goes down"
        assert block.buffer is not None, "only what is here can leave"
        block.copied = sent = self._copies.send(target[: block.num_bytes], block.buffer, block.ready)
        self._drop(block)
        return sent

    def _take_back(self, block: Block) -> None:
        """Let a block's buffer be used again, although it was leaving, once it has been written out."""
        assert block.going is not None, "asked for one that leaves"
        going, block.going = block.going, None
        staged, block.staged = block.staged, None
        try:
            going.wait()
        except OffloadError as error:  # the buffer stays, or the copy on the host: nothing is lost
            self._problem = self._problem or error
            block.below, block.is_saved = staged, staged is not None
            return
        block.is_saved = True
        if staged is not None:
            self.tiers[-1].give(staged, block.num_bytes)

    def _finish_leaving(self, block: Block) -> None:
        self._take_back(block)
        if block.is_saved:
            self._drop(block)

    def _allocate(self, block: Block) -> int | None:
        """Take room for a block on the disk, and return where; ``None`` where there is none."""
        assert self.store is not None, "asked for room on a disk"
        try:
            block.offset = self.store.allocate(block.num_bytes)
        except OffloadError as error:
            self._problem = self._problem or error
        return block.offset

    def _bound_leaving(self, most: int) -> None:
        """Wait until at most so many blocks are leaving, the least recently used first."""
        leaving = [block for block in self._blocks.values() if block.going is not None]
        for block in sorted(leaving, key=lambda block: block.last_use)[: max(len(leaving) - most, 0)]:
            self._finish_leaving(block)

    def _collect(self) -> None:
        """Take the memory of blocks that have left, and go on with those that have come half of the way."""
        for block in self._blocks.values():
            if block.going is not None and block.going.is_done:
                self._finish_leaving(block)
            if block.staged is not None and block.coming is not None and block.coming.is_done:
                self._finish_coming(block)
        landing, self._landing = self._landing, []
        for num_bytes, staged, ready in landing:
            if ready is None or ready.query():
                self.tiers[-1].give(staged, num_bytes)
            else:
                self._landing.append((num_bytes, staged, ready))

    def _make_room(self, tier: Tier, num_bytes: int) -> None:
        """Send blocks away until so many bytes are left; where nothing can go, the budget is exceeded for now.

        The least budget that would do is known at the end of the step, and the error then says it.
        """
        if tier.has(num_bytes):
            return
        self._collect()
        for block in list(self._blocks.values()):
            if tier.has(num_bytes):
                return
            if block.tier is tier and block.going is not None and block.buffer is not None:
                self._finish_leaving(block)
        idle = [b for b in self._blocks.values() if b.tier is tier and b.is_here and not b.users and b.coming is None]
        for block in sorted(idle, key=self._recorder.soonness(lambda block: block.last_use)):
            if tier.has(num_bytes):
                return
            self._send_away(block)
            if block.going is not None and block.buffer is not None:
                self._finish_leaving(block)
        early = [b for b in self._blocks.values() if b.tier is tier and b.coming is not None and not b.users]
        for block in sorted(early, key=self._recorder.soonness(lambda block: block.last_use)):
            if tier.has(num_bytes):
                return
            self._turn_back(block)

    def _turn_back(self, block: Block) -> None:
        """Give up a read that was begun early; the disk still has the values."""
        assert block.coming is not None, "asked for one that is being read"
        coming, block.coming = block.coming, None
        coming.abandon()
        staged, block.staged = block.staged, None
        if staged is not None:
            self.tiers[-1].give(staged, block.num_bytes)
        self._unbind(block)
        self._drop(block)

    def _empty(self, block: Block) -> None:
        """Give up a block's buffers."""
        for transfer in (block.coming, block.going):
            if transfer is not None:
                transfer.abandon()
        block.coming = block.going = None
        if block.buffer is not None:
            self._unbind(block)
            self._drop(block)
        beneath = [buffer for buffer in (block.below, block.staged) if buffer is not None]
        if beneath and self._copies is not None:
            self._copies.synchronize()  # the host's memory may be lent to others at once
        for buffer in beneath:
            self.tiers[-1].give(buffer, block.num_bytes)
        block.below = block.staged = None

    def _unbind(self, block: Block) -> None:
        if block.is_bound:
            block.is_bound = False
            block.owner.point(None)

    def _drop(self, block: Block) -> None:
        buffer, block.buffer, block.ready = block.buffer, None, None
        if buffer is not None:
            if self._copies is not None and self._is_on_device(block):
                self._copies.leave(buffer)
            block.tier.give(buffer, block.num_bytes)
