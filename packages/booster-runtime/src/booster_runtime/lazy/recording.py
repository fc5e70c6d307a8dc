"""`Recording`: what waits for the values of one model's tensors, and gives each where a strategy keeps it.

Values come from one of two sources: the replay of a lazy model's construction, which reads tensors of files by their
ranges, or an eager model's parameters on the host (`HostSource`). `Booster.boost` begins with a lazy model before a
strategy lays it out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from booster_core.errors import ConfigError, LazyInitError
from booster_core.plugin import as_tuple, place_model, rebind
from booster_core.state import box_shape, full_box, intersect, regions_of, slices_of
from booster_runtime.lazy.files import find_reads
from booster_runtime.lazy.fingerprints import fingerprints, geometry
from booster_runtime.lazy.holders import (
    HostSource,
    StateOnHost,
    compare_hosts,
    cut_all,
    find_elsewhere,
    find_holders,
    loosened,
    shards_from_host,
)
from booster_runtime.lazy.tensor import LazyTensor
from booster_runtime.sharding.ranks import agree_on_values, raised_on_all, send_first

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, Boosted
    from booster_core.precision import PrecisionPolicy
    from booster_core.ranks import DistCoordinator, Together
    from booster_core.state import Box, TensorShard
    from booster_runtime.lazy.files import FileRead
    from booster_runtime.lazy.holders import Holder, LazyHolder
    from booster_runtime.lazy.recorder import Recorder


def is_lazy(model: nn.Module) -> bool:
    """Return whether a model has parameters or buffers without values."""
    return any(isinstance(tensor, LazyTensor) for tensor in (*model.parameters(), *model.buffers()))


def materialize(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Give a lazy model its values: those that it would have without `LazyInitContext`.

    Parameters and buffers stay the same objects, so that an optimizer keeps its hold on them. What no module holds
    stays lazy; `Booster.boost` also fills optimizer state. Random generators that were not used since are left where
    eager construction would have left them. At most one tensor exists besides the model's own. A model that is not lazy
    is returned as it is, and not moved.

    Args:
        model: The model; it is changed in place.
        device: Where the values go; the recorded device when ``None``.

    Returns:
        The model.

    Raises:
        LazyInitError: If the context that it was built in is still open.
    """
    if is_lazy(model):
        Recording(model, ReplaySource(model)).fill((), device)
    return model


def take_recording(model: nn.Module, device: torch.device | str = "meta") -> Recording:
    """Take the values out of a model, for a strategy that decides itself where they go.

    Afterwards the lazy tensors of a lazy model, or the parameters of an eager one, are plain meta tensors, in the same
    objects where torch allows it.

    Args:
        model: A lazy model, or one for which `shards_from_host` holds.
        device: Put them on another device than meta, with one element of memory each, for a strategy that keeps the
            objects and changes their memory: meta tensors can't take other memory in place.

    Raises:
        LazyInitError: If the context of a lazy model is still open.
    """
    recording = Recording(model, ReplaySource(model) if is_lazy(model) else HostSource(model))
    recording.hollow(torch.device(device))
    return recording


def fill_elsewhere(elsewhere: Sequence[LazyHolder]) -> None:
    """Give lazy tensors that are not the model's their values, before its own; random generators stay as they are.

    Raises:
        LazyInitError: If the context is still open, or a tensor can't get its values in place.
    """
    cut_all(elsewhere)
    for recorder in {id(holder.recorder): holder.recorder for holder in elsewhere}.values():
        _check_closed(recorder)
        by_slot = _by_slot([holder for holder in elsewhere if holder.recorder is recorder])
        recorder.replay(by_slot.keys(), partial(_hand_over, by_slot, Filling((), None, None)), uses_given=True)


def _by_slot(holders: Sequence[LazyHolder]) -> dict[int, list[LazyHolder]]:
    found: dict[int, list[LazyHolder]] = defaultdict(list)
    for holder in holders:
        found[holder.ref.slot].append(holder)
    return found


def _check_closed(recorder: Recorder) -> None:
    if recorder.is_open:
        msg = "A lazy model gets its values after its `LazyInitContext`. End the `with` block first."
        raise LazyInitError(msg)


class Filling:
    """Takes values: of a tensor that has shards, their parts; of another one, all.

    Args:
        shards: What this rank keeps.
        device: Where the other tensors go; ``None`` for where their values are.
        before_write: See `Recording.fill`.
    """

    def __init__(
        self,
        shards: Iterable[TensorShard],
        device: torch.device | None,
        before_write: Callable[[TensorShard], None] | None,
    ) -> None:
        self.device = device
        self._before_write = before_write
        self._by_name: dict[str, list[TensorShard]] = defaultdict(list)
        for shard in shards:
            self._by_name[shard.name].append(shard)

    def shards_of(self, holder: Holder) -> Sequence[TensorShard] | None:
        """Return the shards of a tensor; ``None`` where this rank keeps all of it."""
        name = next((name for name in holder.names if name in self._by_name), None)
        return None if name is None else self._by_name[name]

    def announce(self, shard: TensorShard) -> None:
        """Let a shard have its memory, before it is written."""
        if self._before_write is not None:
            self._before_write(shard)

    def write(self, shards: Iterable[TensorShard], values: Tensor, box: Box | None = None) -> None:
        """Write to each shard what it has of a tensor's values.

        Args:
            shards: Shards of the tensor.
            values: The values of a box of it, of any dtype and device.
            box: The box; ``None`` for the whole tensor.
        """
        box = full_box(tuple(values.shape)) if box is None else box
        for shard in shards:
            common = [(region, intersect(region.box, box)) for region in regions_of(shard.box, shard.flat)]
            if all(part is None for _, part in common):
                continue
            self.announce(shard)
            data = shard.data.detach()
            for region, part in common:
                if part is None:
                    continue
                target = data
                if shard.flat is not None:
                    target = data.view(-1)[region.start : region.start + region.numel].view(box_shape(region.box))
                target[slices_of(part, region.box)].copy_(values[slices_of(part, box)])


class Recording:
    """The tensors of one model that have no values yet, and the source of the values.

    Args:
        model: The model.
        source: Where its values come from.
    """

    def __init__(self, model: nn.Module, source: ReplaySource | HostSource) -> None:
        self._model, self._source = model, source

    @property
    def replaced(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Parameters that could not stay the same objects, and those in their place."""
        pairs = ((holder.given, holder.tensor) for holder in self._source.holders if holder.is_parameter)
        return {given: tensor for given, tensor in pairs if tensor is not given}  # type: ignore[misc]

    @property
    def name_of(self) -> dict[int, str]:
        """First names of the parameters and buffers, by ``id`` of the tensor objects."""
        return {id(holder.tensor): holder.names[0] for holder in self._source.holders if holder.names}

    def leave_out_absent(self) -> None:
        """Forget the parameters that the model has lost since, so that nothing is made, read or kept for them.

        Draws that they came of still move the generators.
        """
        present = {id(parameter) for parameter in self._model.parameters()}
        held = {id(holder.tensor) for holder in self._source.holders if holder.is_parameter}
        self._source.leave_out(held - present)

    def hollow(self, device: torch.device) -> None:
        """Turn the tensors into meta tensors, or into ones of a device with one element of memory each."""
        with loosened(self._model):
            for holder in self._source.holders:
                holder.become(holder.hollow(device))

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
            device: Where all other tensors that have no values get their memory; where their values are when ``None``.
            before_write: Called before a shard is written, for a strategy that has few shards in memory at a time: from
                then until the next call, or the end, the shard's ``data`` must have its memory.

        Raises:
            LazyInitError: If a file with values was changed since it was recorded, or can't be read any more.

        Collective: every rank of the world, if values are sent by the first rank.
        """
        filling = Filling(shards, None if device is None else torch.device(device), before_write)
        with loosened(self._model):
            self._source.give(filling)


class ReplaySource:
    """The values of a lazy model: its construction, replayed.

    Args:
        model: A lazy model.

    Attributes:
        recorders: The recordings of the contexts that the model was built in; usually one.

    Raises:
        LazyInitError: If the context is still open.
    """

    def __init__(self, model: nn.Module) -> None:
        self.holders = find_holders(model)
        self.recorders = list(dict.fromkeys(holder.recorder for holder in self.holders))
        for recorder in self.recorders:
            _check_closed(recorder)
        cut_all(self.holders)

    def fingerprints(self) -> dict[str, bytes]:
        """Return for each lazy parameter and buffer what is the same in every process that gives it the same values.

        Raises:
            LazyInitError: If a file was changed since it was recorded, or can't be read any more.
        """
        found = {}
        for recorder in self.recorders:
            holders = [holder for holder in self.holders if holder.recorder is recorder]
            with recorder.files.kept_open():
                of_slot = fingerprints(recorder.entries, {holder.ref.slot for holder in holders})
            for holder in holders:
                for name in holder.names[:1]:
                    found[name] = of_slot[holder.ref.slot] + geometry(holder.ref).encode()
        return found

    def leave_out(self, absent: Collection[int]) -> None:
        """Make and read nothing for parameters that the model has lost since."""
        self.holders = [holder for holder in self.holders if id(holder.tensor) not in absent]

    def give(self, filling: Filling) -> None:
        """Read what is a file's by its ranges, and replay what is left, one storage after the other."""
        for recorder in self.recorders:
            holders = [holder for holder in self.holders if holder.recorder is recorder]
            by_slot = _by_slot(_read_directly(recorder, holders, filling))
            recorder.finish(by_slot.keys(), partial(_hand_over, by_slot, filling))


def _read_directly(recorder: Recorder, holders: Sequence[LazyHolder], filling: Filling) -> list[LazyHolder]:
    """Fill the shards of tensors that are a file's from their ranges of it, and return the other tensors."""
    reads = find_reads(recorder.entries, {holder.ref.slot for holder in holders})
    left = []
    with recorder.files.kept_open():
        for holder in holders:
            shards, read = filling.shards_of(holder), reads.get(holder.ref.slot)
            if shards is None or read is None or not _can_read(holder, read):
                left.append(holder)
                continue
            files, dtype = read.open(), holder.ref.dtype
            for shard in shards:
                filling.announce(shard)
                if dtype in (read.meta.dtype, shard.dtype):
                    files.read(read.name, shard)
                else:  # rounded to the model's format before the shard's
                    rounded = torch.empty_like(shard.data.detach(), dtype=dtype)
                    files.read(read.name, replace(shard, dtype=dtype, data=rounded))
                    shard.data.detach().copy_(rounded)
    return left


def _can_read(holder: LazyHolder, read: FileRead) -> bool:
    """Return whether a tensor is a file's tensor as a whole, so that converting its parts converts it."""
    ref = holder.ref
    geometry = torch.empty_strided(ref.size, ref.stride, device="meta")
    return ref.size == read.meta.shape and ref.offset == 0 and geometry.is_contiguous()


def _hand_over(
    by_slot: Mapping[int, Sequence[LazyHolder]], filling: Filling, slot: int, storage: torch.UntypedStorage
) -> bool:
    """Give the tensors of a storage its values; return whether one keeps it."""
    kept = []
    for holder in by_slot[slot]:
        shards = filling.shards_of(holder)
        if shards is None:
            kept.append(holder)
        else:
            filling.write(shards, holder.ref.view_of(storage))
    if kept and filling.device is not None and filling.device != storage.device:
        everything = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        storage = everything.to(filling.device).untyped_storage()
    for holder in kept:
        holder.become(holder.ref.view_of(storage))
    return bool(kept)


_TAKEN = "_booster_has_given_values"
"""Attribute of a model that was lazy, and whose values a `boost` has taken."""


def check_not_taken(model: object) -> None:
    """Raise if a model was lazy and a `boost` that raised has taken its values: they may be anywhere or lost.

    Raises:
        ConfigError: If so.
    """
    if _TAKEN in getattr(model, "__dict__", {}):
        msg = "This model was lazy, and a `boost` that raised has taken its values. Build another model."
        raise ConfigError(msg)


def begin_lazy(
    objects: Boosted, context: BoostContext, placeholders: Literal["device", "own"] | None
) -> Recording | None:
    """Give a lazy model its values, or put placeholders in their place; see `Strategy.placeholders`.

    Returns:
        What fills the placeholders; ``None`` where the model has its values now, or all is left to the strategy.

    Collective: every rank of the world.
    """
    model = objects.model
    with raised_on_all("boost", context.device):
        # First, so that a strategy finds optimizer state with values.
        fill_elsewhere(find_elsewhere(model, objects.optimizers, objects.criterion))
        if is_lazy(model):
            model.__dict__[_TAKEN] = True
            if placeholders is None:
                recording = Recording(model, ReplaySource(model))
                recording.fill((), context.device)
                for optimizer in objects.optimizers:
                    rebind(optimizer, recording.replaced)
    return place_or_hollow(model, objects.optimizer, context) if placeholders == "device" else None


def hollow_objects(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    device: torch.device,
    policy: PrecisionPolicy,
) -> Recording:
    """Take the values of a model's parameters out of it, and bring what is left to a device, with the first rank's.

    Args:
        model: A lazy model, or one for which `shards_from_host` holds; its lazy tensors, or its parameters, become
            tensors of the device with one element of memory each, which a strategy may give other memory by
            ``.data = ...``.
        optimizer: Its optimizer, or several, which keep their hold on the parameters. State of a parameter's shape that
            is on the host stays there, for `HostedOptimizer.adopt` to cut.
        device: Where the model will run.
        policy: Precision to bring to what has values; see `place_model`.

    Returns:
        How the model's values are made, or where they are.

    Collective: every rank of the world, where the model has tensors with values.
    """
    optimizers = as_tuple(optimizer)
    states = [StateOnHost(each) for each in optimizers]
    for state in states:
        state.take()
    recording = take_recording(model, device)
    for each in optimizers:
        rebind(each, recording.replaced)
    hollow = recording.name_of
    place_model(model, optimizers, device, policy, hollow)
    for state in states:
        state.give_back(recording.replaced)
    send_first(each.data for each in (*model.parameters(), *model.buffers()) if id(each) not in hollow)
    return recording


def place_or_hollow(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None, context: BoostContext
) -> Recording | None:
    """Bring a model to the run's device in its own formats, with the first rank's values on every rank.

    The values of a lazy model, and of one on the host, are left for when it is known what this rank keeps of them.

    Args:
        model: The user's model.
        optimizer: Its optimizer, or several.
        context: Device and ranks.

    Returns:
        How those values are made, or where they are, see `hollow_objects`; ``None`` where the model has its values.

    Raises:
        ConfigError: If ranks built different models.

    Collective: every rank of the world.
    """
    unchanged = replace(context.precision, param_dtype=None)
    if is_lazy(model) or shards_from_host(context):
        return hollow_objects(model, optimizer, context.device, unchanged)
    place_model(model, optimizer, context.device, unchanged)
    agree_on_values(model)
    return None


def compare_models(model: nn.Module, context: BoostContext, meeting: Together) -> None:
    """Compare how ranks have built their models, lazily or not, before anything is changed.

    After the meeting every rank replays the first one's draws, so that shards of different ranks are of the same
    tensors. Generators still end up, on each rank, where its own seed leads.

    Args:
        model: The user's model.
        context: Of the `boost`.
        meeting: Of all ranks. It raises `LazyInitError` where ranks have recorded different constructions, other
            constants and scalars too.

    Raises:
        LazyInitError: If the context of a lazy model is still open, or a file can't be read any more.
    """
    source = ReplaySource(model) if is_lazy(model) else None
    recorders = [] if source is None else source.recorders
    values = {} if source is None else source.fingerprints()
    seeds = [recorder.generators.seeds for recorder in recorders]
    built = values, [len(each) for each in seeds]
    coordinator = context.coordinator

    def take_seeds() -> None:
        first = coordinator.broadcast_object(seeds, name="boost", meets=False)
        for recorder, given in zip(recorders, first, strict=True):
            recorder.generators.take_seeds(given)

    meeting.compare(built, differs=lambda: _refuse_other_model(values, coordinator))
    meeting.compare(seeds, differs=take_seeds)
    compare_hosts(model, context, meeting)


def _refuse_other_model(values: Mapping[str, bytes], coordinator: DistCoordinator) -> None:
    """Raise on every rank in what models differ that are not the same on all ranks.

    Raises:
        LazyInitError: Always.

    Collective: every rank of the world.
    """
    first = coordinator.broadcast_object(values, name="boost", meets=False)
    others = [name for name in {**values, **first} if values.get(name) != first.get(name)]
    with coordinator.together("boost"):
        if others:
            msg = (
                f"Rank {coordinator.rank} built another model than rank 0: {len(others)} of {len(values)} tensors "
                f"would have other values, the first of them '{others[0]}', since modules, numbers, constants or files "
                "that their construction uses differ. Build the same model, seed `random`, NumPy and torch alike on "
                "every rank before, and read the same files."
            )
            raise LazyInitError(msg)
    msg = "Some ranks have seeded random generators more often than others while the model was built. Seed alike."
    raise LazyInitError(msg)
