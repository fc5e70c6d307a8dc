"""Gives lazy models their values: all of them here, or each where a sharding strategy keeps it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from booster_core.errors import LazyInitError
from booster_core.state import copy_part
from booster_runtime.lazy.files import find_reads
from booster_runtime.lazy.fingerprints import fingerprints, geometry
from booster_runtime.lazy.holders import Holder, cut_all, find_elsewhere, find_holders, loosened
from booster_runtime.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch import Tensor, nn

    from booster_core.state import TensorShard
    from booster_runtime.lazy.files import FileRead
    from booster_runtime.lazy.recorder import Recorder


def is_lazy(model: nn.Module) -> bool:
    """Return whether a model has parameters or buffers without values."""
    return any(isinstance(tensor, LazyTensor) for tensor in (*model.parameters(), *model.buffers()))


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Give a lazy model its values: those that it would have without `LazyInitContext`.

    Parameters and buffers stay the same objects, so that an optimizer keeps its hold on them. Random generators that
    were not used since are left where eager construction would have left them. At most one tensor exists besides the
    model's own. A model that is not lazy is returned as it is, and not moved.

    Args:
        model: The model; it is changed in place.
        device: Where the values go; the recorded device when ``None``.

    Returns:
        The model.

    Raises:
        LazyInitError: If the context that it was built in is still open, or a tensor that construction read was changed
            since.
    """
    if is_lazy(model):
        Recording(model, find_elsewhere(model)).fill((), device)
    return model


def take_recording(model: nn.Module, device: torch.device | str = "meta") -> Recording:
    """Take a lazy model's recording out of it, for a strategy that decides itself where values go.

    Afterwards the model's lazy tensors are plain meta tensors, in the same objects.

    Args:
        model: The model.
        device: Put them on another device than meta, with one element of memory each, for a strategy that keeps the
            objects and changes their memory: meta tensors can't take other memory in place.

    Raises:
        LazyInitError: If the context is still open.
    """
    recording = Recording(model)
    recording.hollow(device)
    return recording


def fill_elsewhere(elsewhere: Sequence[Holder]) -> None:
    """Give lazy tensors outside of a model their values, before the model's own; random generators stay as they are.

    Raises:
        LazyInitError: If the context is still open, or a tensor can't get its values in place.
    """
    cut_all(elsewhere)
    by_recorder: dict[Recorder, dict[int, list[Holder]]] = defaultdict(lambda: defaultdict(list))
    for holder in elsewhere:
        _check_closed(holder.recorder)
        by_recorder[holder.recorder][holder.ref.slot].append(holder)

    for recorder, by_slot in by_recorder.items():

        def hand_over(slot: int, storage: torch.UntypedStorage, by_slot: dict[int, list[Holder]] = by_slot) -> bool:
            for holder in by_slot[slot]:
                holder.become(holder.ref.of(storage))
            return True

        recorder.replay(by_slot.keys(), hand_over, uses_given=True)


def _check_closed(recorder: Recorder) -> None:
    if recorder.is_open:
        msg = "A lazy model gets its values after its `LazyInitContext`. End the `with` block first."
        raise LazyInitError(msg)


class Recording:
    """The steps that give one model its values.

    Args:
        model: A lazy model.
        elsewhere: Lazy tensors outside of its modules that get their values with it.

    Raises:
        LazyInitError: If the context is still open.
    """

    def __init__(self, model: nn.Module, elsewhere: Sequence[Holder] = ()) -> None:
        self._model = model
        self._holders = [*elsewhere, *find_holders(model)]
        self._recorders: dict[int, Recorder] = {id(holder.recorder): holder.recorder for holder in self._holders}
        for recorder in self._recorders.values():
            _check_closed(recorder)
        # Parameters that could not stay the same objects, and those in their place.
        self.replaced: dict[nn.Parameter, nn.Parameter] = {}
        cut_all(self._holders)

    @property
    def recorders(self) -> list[Recorder]:
        """The recordings of the contexts that the model was built in; usually one."""
        return list(self._recorders.values())

    @property
    def names(self) -> list[str]:
        """First names of the lazy parameters and buffers."""
        return [holder.names[0] for holder in self._holders if holder.names]

    @property
    def name_of(self) -> dict[int, str]:
        """First names of the lazy parameters and buffers, by ``id`` of the tensor objects."""
        return {id(holder.tensor): holder.names[0] for holder in self._holders if holder.names}

    def fingerprints(self) -> dict[str, bytes]:
        """Return for each lazy parameter and buffer what is the same in every process that gives it the same values.

        Raises:
            LazyInitError: If a file was changed since it was recorded, or can't be read any more.
        """
        found = {}
        for key, recorder in self._recorders.items():
            holders = [holder for holder in self._holders if id(holder.recorder) == key]
            with recorder.files.kept_open():
                of_slot = fingerprints(recorder.entries, {holder.ref.slot for holder in holders})
            for holder in holders:
                for name in holder.names[:1]:
                    found[name] = of_slot[holder.ref.slot] + geometry(holder.ref).encode()
        return found

    def leave_out_absent(self) -> None:
        """Forget the parameters that the model has lost since, so that nothing is made or read for them.

        Draws that they came of still move the generators.
        """
        present = {id(parameter) for parameter in self._model.parameters()}
        self._holders = [holder for holder in self._holders if not holder.is_parameter or id(holder.tensor) in present]

    @property
    def run_eagerly(self) -> dict[str, int]:
        """How often each operation ran during construction instead of being recorded."""
        counts: dict[str, int] = defaultdict(int)
        for recorder in self._recorders.values():
            for name, count in recorder.run_eagerly.items():
                counts[name] += count
        return dict(counts)

    def hollow(self, device: torch.device | str = "meta") -> None:
        """Turn the lazy tensors into meta tensors, or into ones of a device with one element of memory each."""
        with loosened(self._model):
            for holder in self._holders:
                ref = holder.ref
                if torch.device(device).type == "meta":
                    hollow = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device="meta")
                else:
                    hollow = torch.zeros((), dtype=ref.dtype, device=device).expand(ref.size)
                self._become(holder, hollow)

    def place(
        self,
        place: Callable[[str, Tensor], None],
        names: Collection[str],
        device: torch.device | str | None = None,
    ) -> None:
        """Hand each named tensor over, whole, after its last write; give all others their values on a device.

        Args:
            place: Called once for each named tensor, with the name and its values, which are gone after the call.
            names: Parameters and buffers that ``place`` takes; a tied one goes by any of its names.
            device: Where all other lazy tensors of the model get their memory.
        """
        by_slot: dict[tuple[int, int], list[Holder]] = defaultdict(list)
        for holder in self._holders:
            by_slot[id(holder.recorder), holder.ref.slot].append(holder)
        for key, recorder in self._recorders.items():

            def hand_over(slot: int, storage: torch.UntypedStorage, key: int = key) -> bool:
                return self._hand_over(by_slot[key, slot], storage, place, names, device)

            with loosened(self._model):
                recorder.finish([slot for owner, slot in by_slot if owner == key], hand_over)

    def fill(
        self,
        shards: Iterable[TensorShard],
        device: torch.device | str | None = None,
        *,
        before_write: Callable[[TensorShard], None] | None = None,
    ) -> None:
        """Write to each shard its part of the tensor that it names; give all others their values on a device.

        Args:
            shards: What this rank keeps; a tensor may have several shards. ``data`` may be on any device.
            device: Where all other lazy tensors of the model get their memory.
            before_write: Called before a shard is written, for a strategy that has few shards in memory at a time: from
                then until the next call, or the end, the shard's ``data`` must have its memory.
        """
        by_name: dict[str, list[TensorShard]] = defaultdict(list)
        for shard in shards:
            by_name[shard.name].append(shard)

        def write(name: str, value: Tensor) -> None:
            for shard in by_name[name]:
                if before_write is not None:
                    before_write(shard)
                copy_part(value, shard)

        self._read_directly(by_name, before_write)
        self.place(write, by_name.keys(), device)

    def _read_directly(
        self, by_name: dict[str, list[TensorShard]], before_write: Callable[[TensorShard], None] | None
    ) -> None:
        """Fill the shards of tensors that are a file's from their ranges of it, and take them off the lists."""
        for key, recorder in self._recorders.items():
            holders = [holder for holder in self._holders if id(holder.recorder) == key]
            reads = find_reads(recorder.entries, {holder.ref.slot for holder in holders})
            with recorder.files.kept_open():
                for holder in holders:
                    name = next((name for name in holder.names if name in by_name), None)
                    read = reads.get(holder.ref.slot)
                    if name is not None and read is not None and _can_read(holder, read, by_name[name]):
                        files = read.open()
                        for shard in by_name.pop(name):
                            if before_write is not None:
                                before_write(shard)
                            files.read(read.name, shard)
                        self._holders.remove(holder)

    def _become(self, holder: Holder, value: Tensor) -> None:
        old = holder.tensor
        holder.become(value)
        if holder.is_parameter and holder.tensor is not old:
            self.replaced[old] = holder.tensor  # type: ignore[index,assignment]

    def _hand_over(
        self,
        holders: list[Holder],
        storage: torch.UntypedStorage,
        place: Callable[[str, Tensor], None],
        names: Collection[str],
        device: torch.device | str | None,
    ) -> bool:
        kept = []
        for holder in holders:
            name = next((name for name in holder.names if name in names), None)
            if name is None:
                kept.append(holder)
            else:
                place(name, holder.ref.of(storage))
        moved = storage
        if kept and device is not None and torch.device(device) != storage.device:
            everything = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            moved = everything.to(device).untyped_storage()
        for holder in kept:
            self._become(holder, holder.ref.of(storage if holder.is_elsewhere else moved))
        return bool(kept)


def _can_read(holder: Holder, read: FileRead, shards: list[TensorShard]) -> bool:
    """Return whether a tensor is a file's tensor as a whole, so that converting its parts converts it."""
    ref = holder.ref
    geometry = torch.empty_strided(ref.size, ref.stride, device="meta")
    is_whole = ref.size == read.meta.shape and ref.offset == 0 and geometry.is_contiguous()
    return is_whole and all(ref.dtype in (read.meta.dtype, shard.dtype) for shard in shards)
