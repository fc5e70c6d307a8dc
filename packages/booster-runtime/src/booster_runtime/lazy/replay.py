"""Runs a recording: draws in program order, and everything else as early as its values are there.

Each storage is made when it is first needed and handed over, or dropped, after the last entry that touches it. Draws
that no wanted value depends on are left out, unless the state after them is needed.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from booster_runtime.lazy.log import COPIES, UNSET, Constant, Entry, Ref

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from booster_runtime.lazy.generators import Draw, Generators, Playback
    from booster_runtime.lazy.log import Storages


_HEAP_BYTES = 32 << 20
"""Memory up to this size is used again: freed between what is kept, a C library's heap would keep it."""


class Replay:
    """One run of a recording.

    Args:
        entries: The recording.
        wanted: Storages whose values are handed over.
        storages: Sizes and recorded devices of all.
        hand_over: Called with each wanted slot and its storage, once, when it has its final values; returns whether
            the storage is kept.
        generators: The generators that it draws from; they are left as they are.
        uses_given: Start from the first rank's seeds, see `Generators.given`.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        wanted: Collection[int],
        storages: Storages,
        hand_over: Callable[[int, torch.UntypedStorage], bool],
        generators: Generators,
        *,
        uses_given: bool = False,
    ) -> None:
        self._wanted = frozenset(wanted)
        self._recorded = storages
        self._hand_over = hand_over
        self._generators = generators
        self._uses_given = uses_given
        self._entry_of = {entry.draw: entry for entry in entries if entry.draw is not None}
        live = find_live(entries, wanted)
        self._num_uses = Counter(slot for index in live for slot in entries[index].touches)
        # What depends on nothing waits for whoever needs it.
        self._waiting: dict[int, Entry] = {}
        self._order = in_order(entries, live)
        for entry in self._order:
            if entry.is_source and any(self._num_uses[slot] > 1 for slot in entry.makes):
                self._waiting.update(dict.fromkeys(entry.makes, entry))
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._spare: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
        self._playback: Playback

    def run(self, ends_of: Sequence[Draw] = ()) -> list[Tensor]:
        """Run it.

        Args:
            ends_of: Draws after which the state of the generator is asked for.

        Returns:
            These states.
        """
        default_dtype = torch.get_default_dtype()
        waiting = {id(entry) for entry in self._waiting.values()}
        try:
            with (
                torch.inference_mode(mode=False),
                torch.no_grad(),
                self._generators.playback(self._discard_draw, uses_given=self._uses_given) as self._playback,
            ):
                for entry in self._order:
                    if id(entry) not in waiting:
                        self._perform(entry)
                ends = [self._playback.end_of(draw) for draw in ends_of]
        finally:
            torch.set_default_dtype(default_dtype)
        for slot in self._wanted - self._num_uses.keys():
            self._hand_over(slot, self._storage(slot))  # nobody ever wrote to it
        return ends

    def _perform(self, entry: Entry) -> None:
        if entry.name not in UNSET:  # which is made where it is first written
            # Its arguments are made after draws that were left out, which need memory as well.
            with nullcontext() if entry.draw is None else self._playback.at(entry.draw):
                args, kwargs = tree_map(self._real, (entry.args, entry.kwargs))
                if entry.name in COPIES:
                    ref = entry.results[0][1]
                    made = ref.view_of(self._memory(ref.slot)).copy_(args[0])
                else:
                    made = self._call(entry, args, kwargs)
            given = {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if _has_memory(leaf)}
            tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
            for number, ref in entry.results:
                # A storage must not be another one's as well.
                is_given = tensors[number].data_ptr() in given
                self._storages[ref.slot] = self._storage_like(tensors[number], ref, is_given=is_given)
            del args, kwargs, made, tensors
        self._finish(entry)

    def _call(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        if torch.get_default_dtype() != entry.dtype:
            torch.set_default_dtype(entry.dtype)
        return entry.function(*args, **kwargs)

    def _finish(self, entry: Entry) -> None:
        for slot in entry.touches:
            self._num_uses[slot] -= 1
            if not self._num_uses[slot]:
                storage = self._storage(slot)
                del self._storages[slot]
                is_kept = slot in self._wanted and self._hand_over(slot, storage)
                if not is_kept and storage.device.type == "cpu" and storage.nbytes() <= _HEAP_BYTES:
                    self._spare[storage.nbytes(), storage.device] = storage

    def _real(self, value: Any) -> Any:
        if isinstance(value, Ref):
            if value.is_shape_only:
                return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="meta")
            return value.view_of(self._storage(value.slot))
        return value.values if isinstance(value, Constant) else value

    def _storage(self, slot: int) -> torch.UntypedStorage:
        source = self._waiting.get(slot)
        if source is not None:
            for made in source.makes:
                del self._waiting[made]
            self._perform(source)
        if slot not in self._storages:
            self._storages[slot] = self._memory(slot)
        return self._storages[slot]

    def _memory(self, slot: int, device: torch.device | None = None) -> torch.UntypedStorage:
        """Return memory for a storage, on its recorded device or another one; what it holds is not defined."""
        num_bytes, device = self._recorded.num_bytes(slot), device or self._recorded.device(slot)
        spare = self._spare.pop((num_bytes, device), None)
        return spare or torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def _storage_like(self, tensor: Tensor, ref: Ref, *, is_given: bool) -> torch.UntypedStorage:
        """Return the storage of a result, laid out as it was recorded."""
        storage = tensor.untyped_storage()
        is_same = tensor.stride() == ref.stride and tensor.storage_offset() == ref.offset
        if is_same and not is_given and storage.nbytes() == self._recorded.num_bytes(ref.slot):
            return storage
        laid_out = self._memory(ref.slot, storage.device)
        ref.view_of(laid_out).copy_(tensor)
        return laid_out

    def _discard_draw(self, draw: Draw) -> None:
        """Do a draw whose values nobody needs."""
        entry = self._entry_of[draw]

        def scratch(value: Any) -> Any:
            if not isinstance(value, Ref) or value.is_shape_only:
                return self._real(value)
            return value.view_of(self._memory(value.slot))

        args, kwargs = tree_map(scratch, (entry.args, entry.kwargs))
        self._call(entry, args, kwargs)


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.numel() > 0


def in_order(entries: Sequence[Entry], live: Sequence[int]) -> list[Entry]:
    """Return the live entries as they are run: draws in their places, and the others right after what they wait for.

    Else a model that is converted in the end would be there as a whole before.

    Args:
        entries: The recording.
        live: The numbers of those that are run.
    """
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    times: list[tuple[int, int]] = []
    for index in live:
        entry = entries[index]
        time = index
        if entry.draw is None:
            awaited = [written[slot] for slot in entry.reads | entry.writes if slot in written]
            time = max([*awaited, *(read[slot] for slot in entry.writes if slot in read)], default=index)
        for slot in entry.reads:
            read[slot] = max(read.get(slot, -1), time)
        for slot in entry.writes if entry.is_source else entry.writes | entry.makes:
            written[slot] = time
        times.append((time, index))
    return [entries[index] for _, index in sorted(times)]


def find_live(entries: Sequence[Entry], wanted: Collection[int]) -> list[int]:
    """Return the numbers of the entries on which a wanted storage's final values depend."""
    needed = set(wanted)
    live = []
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        # How many numbers such a draw takes may depend on what it reads (as for poisson), so it always counts.
        if not needed.isdisjoint(entry.writes | entry.makes) or (entry.draw is not None and entry.reads):
            live.append(index)
            needed -= entry.covers | entry.makes
            needed |= entry.reads
    return live[::-1]
