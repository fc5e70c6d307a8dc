"""Runs a recording: in program order where generators are concerned, and otherwise as early as values are there.

Each storage is made when it is first needed and handed over, or dropped, after the last entry that touches it. Draws
that no wanted value depends on are left out, unless the state after them is needed.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from booster_runtime.lazy.log import Constant, Entry, Ref
from booster_runtime.lazy.operations import COPIES, UNSET

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from booster_runtime.lazy.generators import Draw, Generators, Playback


class Replay:
    """One run of a recording.

    Args:
        entries: The recording.
        wanted: Storages whose values are handed over.
        slot_bytes: Size of each storage.
        slot_devices: The recorded device of each storage.
        hand_over: Called with each wanted slot and its storage, once, when it has its final values; returns whether
            the storage is kept.
        generators: The generators that it draws from; they are left as they are.
        uses_given: Start from the first rank's seeds, see `Generators.given`.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        wanted: Collection[int],
        slot_bytes: Sequence[int],
        slot_devices: Sequence[torch.device],
        hand_over: Callable[[int, torch.UntypedStorage], bool],
        generators: Generators,
        *,
        uses_given: bool = False,
    ) -> None:
        self._entries = entries
        self._wanted = frozenset(wanted)
        self._slot_bytes = slot_bytes
        self._slot_devices = slot_devices
        self._hand_over = hand_over
        self._generators = generators
        self._uses_given = uses_given
        self._plan: Plan = make_plan(entries, wanted)
        self._entry_of = {entry.draw: entry for entry in entries if entry.draw is not None}
        self._memory = Memory()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._num_uses = dict(self._plan.num_uses)
        self._is_done = [False] * len(entries)
        self._ready: list[int] = []
        self._playback: Playback

    def run(self, ends_of: Sequence[Draw] = ()) -> list[Tensor]:
        """Run it.

        Args:
            ends_of: Draws after which the state of the generator is asked for.

        Returns:
            These states.
        """
        default_dtype = torch.get_default_dtype()
        try:
            with (
                torch.inference_mode(mode=False),
                torch.no_grad(),
                self._generators.playback(self._discard_draw, uses_given=self._uses_given) as self._playback,
            ):
                for index, entry in enumerate(self._entries):
                    # A source waits for whoever needs it.
                    waits = entry.is_source and bool(self._plan.followers[index])
                    if self._plan.is_live[index] and not self._is_done[index] and not waits:
                        self._execute(index)
                        self._cascade()
                ends = [self._playback.end_of(draw) for draw in ends_of]
        finally:
            torch.set_default_dtype(default_dtype)
        for slot in self._wanted - self._plan.num_uses.keys():
            self._hand_over(slot, self._storage(slot))  # nobody ever wrote to it
        return ends

    def _execute(self, index: int) -> None:
        for source in self._plan.sources[index]:
            if not self._is_done[source]:
                self._perform(source)
        self._perform(index)

    def _cascade(self) -> None:
        """Run what could wait for its place in the program but needs not, so that its inputs can go."""
        while self._ready:
            self._execute(heapq.heappop(self._ready))

    def _perform(self, index: int) -> None:
        entry = self._entries[index]
        if entry.name in UNSET:
            self._finish(index)  # made where it is first written
            return
        # Its arguments are made after draws that were left out, which need memory as well.
        with nullcontext() if entry.draw is None else self._playback.at(entry.draw):
            args, kwargs = tree_map(self._real, (entry.args, entry.kwargs))
            if entry.name in COPIES:
                ref = entry.results[0][1]
                made = ref.view_of(self._storage(ref.slot)).copy_(args[0])
            else:
                made = self._call(entry, args, kwargs)
        if entry.results:
            given = {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if _has_memory(leaf)}
            tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
            for number, ref in entry.results:
                if ref.slot not in self._storages:
                    # A storage must not be another one's as well: it is used again when it is let go of.
                    tensor = tensors[number].clone() if tensors[number].data_ptr() in given else tensors[number]
                    self._storages[ref.slot] = self._storage_like(tensor, ref)
                    del tensor
            del tensors
        del args, kwargs, made
        self._finish(index)

    def _call(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        if torch.get_default_dtype() != entry.dtype:
            torch.set_default_dtype(entry.dtype)
        return entry.function(*args, **kwargs)

    def _finish(self, index: int) -> None:
        self._is_done[index] = True
        for slot in self._entries[index].touches:
            self._num_uses[slot] -= 1
            if not self._num_uses[slot]:
                storage = self._storage(slot)
                del self._storages[slot]
                is_kept = slot in self._wanted and self._hand_over(slot, storage)
                if not is_kept and storage.device == self._slot_devices[slot]:
                    self._memory.give(storage)
                del storage
        if self._entries[index].is_source:
            return
        for follower in self._plan.followers[index]:
            self._plan.num_awaited[follower] -= 1
            if not self._plan.num_awaited[follower] and self._entries[follower].draw is None:
                heapq.heappush(self._ready, follower)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Ref):
            if value.is_shape_only:
                return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="meta")
            return value.view_of(self._storage(value.slot))
        return value.values if isinstance(value, Constant) else value

    def _storage(self, slot: int) -> torch.UntypedStorage:
        if slot not in self._storages:
            self._storages[slot] = self._memory.take(self._slot_bytes[slot], self._slot_devices[slot])
        return self._storages[slot]

    def _storage_like(self, tensor: torch.Tensor, ref: Ref) -> torch.UntypedStorage:
        """Return the storage of a result, laid out as it was recorded."""
        storage = tensor.untyped_storage()
        is_same = tensor.stride() == ref.stride and tensor.storage_offset() == ref.offset
        if is_same and storage.nbytes() == self._slot_bytes[ref.slot]:
            return storage
        laid_out = self._memory.take(self._slot_bytes[ref.slot], storage.device)
        ref.view_of(laid_out).copy_(tensor)
        return laid_out

    def _discard_draw(self, draw: Draw) -> None:
        """Do a draw whose values nobody needs."""
        entry = self._entry_of[draw]
        storages: list[torch.UntypedStorage] = []
        args, kwargs = tree_map(lambda value: self._scratch(value, storages), (entry.args, entry.kwargs))
        self._call(entry, args, kwargs)
        del args, kwargs
        for storage in storages:
            self._memory.give(storage)

    def _scratch(self, value: Any, storages: list[torch.UntypedStorage]) -> Any:
        """Return what stands for an argument whose values nobody keeps."""
        if not isinstance(value, Ref) or value.is_shape_only:
            return self._real(value)
        storages.append(self._memory.take(self._slot_bytes[value.slot], self._slot_devices[value.slot]))
        return value.view_of(storages[-1])


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.numel() > 0


@dataclass
class Plan:
    """How to replay a recording.

    Args:
        is_live: For each entry, whether its values are needed.
        followers: For each live entry, the later live entries that must wait for it.
        num_awaited: For each live entry, how many earlier ones it waits for, sources not counted.
        sources: For each live entry, the sources that it needs.
        num_uses: For each storage, how many live entries touch it.
    """

    is_live: list[bool]
    followers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_awaited: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    sources: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_uses: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def make_plan(entries: Sequence[Entry], wanted: Collection[int]) -> Plan:
    """Plan a replay after which the wanted storages hold their final values.

    Args:
        entries: The recording.
        wanted: Storages.
    """
    plan = Plan(find_live(entries, wanted))
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        if not plan.is_live[index]:
            continue
        awaited = {writer[slot] for slot in entry.reads | entry.writes if slot in writer}
        for slot in entry.writes:
            awaited.update(readers.pop(slot, ()))
        for earlier in awaited - {index}:
            plan.followers[earlier].append(index)
            if entries[earlier].is_source:
                plan.sources[index].append(earlier)
            else:
                plan.num_awaited[index] += 1
        for slot in entry.reads:
            readers[slot].append(index)
        for slot in entry.writes | entry.makes:
            writer[slot] = index
        for slot in entry.touches:
            plan.num_uses[slot] += 1
    return plan


def find_live(entries: Sequence[Entry], wanted: Collection[int]) -> list[bool]:
    """Return for each entry whether a wanted storage's final values depend on it."""
    needed = set(wanted)
    is_live = [False] * len(entries)
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        # How many numbers such a draw takes may depend on what it reads (as for poisson), so it always counts.
        if not needed.isdisjoint(entry.writes | entry.makes) or (entry.draw is not None and entry.reads):
            is_live[index] = True
            needed -= entry.covers | entry.makes
            needed |= entry.reads
    return is_live


_HEAP_BYTES = 32 << 20


class Memory:
    """Makes storages, and keeps one spare of each size."""

    def __init__(self) -> None:
        self._spare: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def take(self, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
        """Return a storage; what it holds is not defined."""
        spare = self._spare.pop((num_bytes, device), None)
        if spare is not None:
            return spare
        return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def give(self, storage: torch.UntypedStorage) -> None:
        """Take a storage back that nobody else holds."""
        if storage.device.type == "cpu" and storage.nbytes() <= _HEAP_BYTES:
            self._spare[storage.nbytes(), storage.device] = storage
