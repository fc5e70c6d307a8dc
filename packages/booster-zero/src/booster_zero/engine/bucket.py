"""Parameters that are gathered and reduced together: their whole values, and the sum of their gradients.

A bucket is laid out flat; each rank owns a slice of it (`booster_zero.engine.shard`). `Keep` says how long a rank has
the whole values. Where they are gathered, parameters are views of them, so that a gather of slices arrives in the
parameters. Elsewhere parameters are absent: see `booster_runtime.memory.absent`. Buffers of whole values live as long
as anything refers to them, so a bucket may be released at any time: what still reads it keeps its own view.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.ranks import refuse_capture
from booster_runtime import collectives
from booster_runtime.collectives import Pending, sum_into
from booster_runtime.memory import AbsentTensors
from booster_zero.engine.home import Role, zeros_in_memory
from booster_zero.engine.outgoing import Outgoing
from booster_zero.engine.shard import Shard
from booster_zero.engine.whole import Keep, WholeState, check_transition

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.home import Home
    from booster_zero.engine.partition import BucketPlan
    from booster_zero.engine.shard import BucketPiece, Format
    from booster_zero.engine.whole import BufferPool


class User(Protocol):
    """Who gathers buckets, and is told what becomes of their parameters."""

    def on_use(self, bucket: Bucket, index: int, what: str) -> AbstractContextManager[None] | None:
        """Gather a bucket one of whose parameters is used, or raise; see `AbsentTensors`."""

    def on_show(self, bucket: Bucket) -> None:
        """Take note of a bucket whose parameters have just got values."""

    def on_hide(self, bucket: Bucket) -> None:
        """Take note of a bucket whose parameters are about to lose them."""


class Bucket(Shard):
    """Parameters that are reduced and gathered together.

    Args:
        plan: Layout.
        parameters: The model's parameters by number; those of the plan become views of this bucket, or absent.
        format: Formats and devices.
        ranks: The ranks that share the bucket.
        home: Keeps this rank's slice.
        pool: Lends memory for whole values; ``None`` keeps them always.
        user: Gathers it; it is not kept alive. ``None`` where nobody does.
        valued: Numbers of the parameters whose values are taken; ``None`` for all. The others are zero at first.

    Attributes:
        keep: How long this rank has the whole values.
        whole: Those values; ``None`` where they are not here.
        has_masters: Whether the optimizer updates a copy in another format.
        state: What is here of them.
        pins: How many users there are that need them to stay.
        awaits_average: Whether the gradient has been reduced since `start_average` averaged it over the replicas.

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
        pool: BufferPool | None = None,
        user: User | None = None,
        valued: Container[int] | None = None,
    ) -> None:
        low, high = plan.bounds[ranks.shard_rank : ranks.shard_rank + 2]
        self.keep = Keep.ALWAYS if pool is None else Keep.IN_USE
        self.whole: Tensor | None = None
        if pool is None:
            self.whole = torch.zeros(plan.numel, dtype=format.working, device=format.device)
            own = self.whole[low:high]
        else:
            own = zeros_in_memory(high - low, format.working, format.device, format.device)
        members = [parameters[slot.index] for slot in plan.slots]
        super().__init__(plan, members, format, ranks, home=home, own=own)
        self.has_masters = format.working != format.master
        self.state = WholeState.GATHERED if pool is None else WholeState.SHARDED
        self.pins = 0
        self._pool = pool
        self._user = _nobody if user is None else weakref.ref(user)
        self._pending: Pending | None = None
        self._shown: list[Tensor] | None = None  # what parameters are shown, as long as the whole values stay
        self._added: set[int] = set()
        self._is_averaged = False
        self.awaits_average = False
        self._versions: list[int] = []
        self._offsets: list[int | None] | None = None  # of the parameters that take memory, in bytes
        taken = [piece for piece in self.pieces if valued is None or piece.index in valued]
        for piece in taken:
            part = piece.parameter.data.reshape(-1)[piece.start : piece.stop]
            piece.values.data.copy_(part.view(piece.values.shape))
        if self.whole is not None:
            self._show_whole(self.whole)
            self.note_versions()
            return
        if taken:
            self.round_values()
        self.hand_to_home()
        self._absent.hide()

    def _show_whole(self, whole: Tensor) -> None:
        """Let the parameters be views of the whole values, which take the parameters'."""
        for slot, parameter in zip(self.plan.slots, self.parameters, strict=True):
            place = whole[slot.offset : slot.offset + slot.numel]
            place.copy_(parameter.data.reshape(-1))
            parameter.data = place.view(parameter.shape)

    # ---- whole values that are always here

    @property
    def moves_values(self) -> bool:
        """Whether ``values`` must be moved when parameters are laid out again; not where the parameters hold them."""
        return self.format.has_copy or self.keep is not Keep.ALWAYS

    def note_versions(self) -> None:
        """Count the working values as those that the optimizer knows of, where they are always here."""
        if not self.format.has_copy or self.keep is not Keep.ALWAYS:  # it has no others, or nobody else writes them
            return
        self._versions = [parameter._version for parameter in self.parameters]  # noqa: SLF001 - as autograd does

    def notice_changes(self, names: Mapping[int, str]) -> None:
        """Take in what somebody else has written into the parameters since the last update, such as loaded values.

        Raises:
            ConfigError: If a parameter has left the bucket: updates would not reach it any more.
        """
        assert self.whole is not None, "asked of what is always whole"
        start, itemsize = self.whole.data_ptr(), self.whole.element_size()
        if self._offsets is None:
            self._offsets = [slot.offset * itemsize if slot.numel else None for slot in self.plan.slots]
        for position, (offset, parameter) in enumerate(zip(self._offsets, self.parameters, strict=True)):
            if offset is not None and parameter.data_ptr() != start + offset:
                name = names[self.plan.slots[position].index]
                raise _left(name, "Copy values into it in place, for example with `parameter.copy_(values)`.")
        known = self._versions
        self.note_versions()
        if known != self._versions:
            self.take_working_values()

    def free_whole(self) -> None:
        """Give up whole values that are always here, because all parameters are in other buckets now.

        Copies that the optimizer updates stay.
        """
        if self.keep is Keep.ALWAYS:
            self.whole = None
            self._rebind_own(None)

    # ---- whole values for a time

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters can be read."""
        return self.state is WholeState.GATHERED

    @property
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
        bounds, rank = self.plan.bounds, self.ranks.shard_rank
        self._fetch(Role.PARAM).wait()
        if self.ranks.shard_size == 1:
            self.whole = self.own
            return
        self.home.reserve(self.whole_bytes)
        self.whole = self._pool.take(self.plan.numel, self.format.working, self.format.device)
        self.whole[bounds[rank] : bounds[rank + 1]].copy_(self.own)
        self._release(Role.PARAM, changed=False)
        self._pending = collectives.all_gather(self.whole, bounds, self.ranks.gathering)

    def finish_gather(self) -> None:
        """Wait for the whole values, and let the parameters be views of them.

        Collective: none; the gather was entered when it was started.
        """
        whole = self.arrived()
        if self._shown is None:
            self._shown = [whole[begin:end].view(shape) for begin, end, shape in self._places]
        self._absent.show(self._shown)
        self._become(WholeState.GATHERED)
        self._tell_shown()

    def arrived(self) -> Tensor:
        """Wait for the whole values, and return them, shape ``(length of the bucket,)``.

        Collective: none; the gather was entered when it was started.
        """
        self._wait()
        assert self.whole is not None, "a gather that has been started has a buffer"
        return self.whole

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

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
        self._pending = pending
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
        if self.is_gathered:
            self.hide()
        self._wait()
        self._become(WholeState.SHARDED)
        whole, self.whole, self._shown = self.whole, None, None
        if whole is None:  # its gather failed
            return
        if self.ranks.shard_size == 1:
            self._release(Role.PARAM, changed=False)
        else:
            self.home.free(self.whole_bytes)
            self._pool.give(whole)

    @functools.cached_property
    def position_of(self) -> dict[int, int]:
        """Where parameters are among those of the bucket, by their numbers."""
        return {slot.index: position for position, slot in enumerate(self.plan.slots)}

    @functools.cached_property
    def _places(self) -> list[tuple[int, int, torch.Size]]:
        """Where the parameters begin and end in the whole values, and their shapes."""
        slots = zip(self.plan.slots, self.parameters, strict=True)
        return [(slot.offset, slot.offset + slot.numel, parameter.shape) for slot, parameter in slots]

    def _tell_shown(self) -> None:
        user = self._user()
        if user is not None:
            user.on_show(self)

    def write_back(self) -> None:
        """Take this rank's slice from the parameters, some of which somebody has changed, or given other memory.

        Raises:
            ConfigError: If one has another shape now.
        """
        assert self.whole is not None, "only what is gathered can have been changed"
        for (begin, end, shape), parameter in zip(self._places, self.parameters, strict=True):
            place = self.whole[begin:end].view(shape)
            if parameter.data_ptr() != place.data_ptr():
                if parameter.shape != shape:
                    msg = f"A parameter of shape {tuple(shape)} was given values of shape {tuple(parameter.shape)}."
                    raise ConfigError(msg)
                place.copy_(parameter.data)
                parameter.data = place
        bounds, rank = self.plan.bounds, self.ranks.shard_rank
        with self.in_use(Role.PARAM, Role.OPTIM, changes=True):
            if self.ranks.shard_size > 1:
                self.own.copy_(self.whole[bounds[rank] : bounds[rank + 1]])
            self.take_working_values()

    def _become(self, state: WholeState) -> None:
        check_transition(self.state, state)
        self.state = state

    # ---- updates

    def publish(self) -> Pending:
        """Start bringing what the optimizer updated into every rank's parameters; into the slice if they are not whole.

        Collective: the shard group, where the whole values are always here; else none.
        """
        if self.whole is None or self.keep is not Keep.ALWAYS:
            self.round_values()
            return Pending()
        bounds, group = self.plan.bounds, self.ranks.shard_group
        if self.format.home == self.format.device:
            self.round_values()
            if self.ranks.shard_size == 1:
                return Pending()
            return collectives.all_gather(self.whole, bounds, group)
        values = self.values
        if values.dtype != self.own.dtype:
            taken = zeros_in_memory(values.numel(), self.own.dtype, values.device, self.own.device, is_kept=False)
            values = taken.copy_(values)
        copy_stream = self.home.copy_stream(self.format.device, up=True)
        with copy_stream.after_compute():
            self.own.copy_(values, non_blocking=True)
            copied = copy_stream.record()
            gathered = collectives.all_gather(self.whole, bounds, group)

        def finish() -> None:
            if copied is not None:
                copied.synchronize()  # `values` may be changed again

        return Pending([gathered], finish, keep=values)

    def mark_changed(self) -> None:
        """Tell autograd that the parameters have other values: it refuses to run former graphs backward."""
        torch.autograd.graph.increment_version(self.parameters)
        if self.keep is Keep.ALWAYS:
            self.note_versions()
        elif self.is_gathered:
            self._tell_shown()

    # ---- reduction

    @property
    def is_active(self) -> bool:
        """Whether any of the parameters is being trained; others take part in no communication."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def num_trained(self) -> int:
        """Number of parameters that are being trained."""
        return [parameter.requires_grad for parameter in self.parameters].count(True)

    @functools.cached_property
    def adds_at_once(self) -> bool:
        """Whether a gradient is added to this rank's as it comes: all of it is here at all times."""
        return not self.home.moves and self.ranks.shard_size == 1 and self.format.device == self.format.home

    @property
    def averages_at_once(self) -> bool:
        """Whether `start_reduction` averages over the replicas, too; else that is left for the end of all rounds."""
        return self.adds_at_once and self.ranks.replica_group is not None

    @property
    def scratch_numel(self) -> int:
        """Number of elements that `start_reduction` receives from other ranks."""
        is_received = self.format.device.type == "cpu" and not self.format.is_table
        return (self.ranks.shard_size - 1) * self.numel if is_received else 0

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
        target, added, num_shares = self.gradients_by_parameter()[index], self._added, self.ranks.num_shares
        if num_shares == 1 and index not in added:
            target.copy_(gradient)
        else:
            sum_into(target, [gradient], scale=1.0 / num_shares, accumulate=index in added)
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

    def drop_gradient(self) -> None:
        """Forget the gradient; see `Shard.drop_gradient`."""
        super().drop_gradient()
        self._is_averaged = self.awaits_average = False
        self._added.clear()

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
            return self._start_average_of_wholes() if self.averages_at_once else Pending()
        is_first = not self.has_gradient
        self.awaits_average = self.ranks.replica_group is not None
        self.make_gradient()
        self._fetch(Role.GRAD).wait()
        pending = self._start_sum(gradients, scratch, is_first=is_first)
        return Pending([pending], self._end_reduction) if self.home.moves else pending

    def _end_reduction(self) -> None:
        self.start_early_descent()
        self._release(Role.GRAD, changed=True)

    def start_average(self) -> Pending:
        """Start averaging over the replicas what `start_reduction` has added up since they did; nothing where none has.

        What they have averaged before is the same on each, and stays.

        Collective: the shards' replicas, where ``awaits_average``; else none.
        """
        if not self.awaits_average:
            return Pending()
        self.awaits_average = False
        self.make_gradient()
        self._fetch(Role.GRAD).wait()
        average = collectives.all_reduce(self.make_gradient(), dist.ReduceOp.AVG, self.ranks.replica_group)
        return Pending([average], lambda: self._release(Role.GRAD, changed=True)) if self.home.moves else average

    @functools.cached_property
    def _outgoing(self) -> Outgoing:
        return Outgoing(self.plan, self.format)

    def _start_sum(self, gradients: Mapping[int, Tensor], scratch: Tensor, *, is_first: bool) -> Pending:
        target, group, bounds = self.make_gradient(), self.ranks.shard_group, self.plan.bounds
        scale = 1.0 / (self.ranks.shard_size * self.ranks.num_shares)
        if self.format.device.type == "cpu":
            parts = self._outgoing.parts(gradients)
            if self.format.is_table:
                shapes = [parameter.shape for parameter in self.parameters]
                parts = [(at, part.view(shape)) for (at, part), shape in zip(parts, shapes, strict=True)]
            return collectives.reduce_scatter(
                parts, bounds, target, group, scale=scale, accumulate=not is_first, scratch=scratch
            )
        source = self._outgoing.joined(self.plan.slots, gradients)
        if self.format.home == self.format.device:
            return collectives.reduce_scatter(source, bounds, target, group, scale=scale, accumulate=not is_first)
        # The copy to the host begins as soon as the sum is there, while the device goes on with backward.
        landing = target
        if not is_first:
            landing = zeros_in_memory(target.numel(), target.dtype, target.device, source.device, is_kept=False)
        copy_stream = self.home.copy_stream(self.format.device, up=False)
        with copy_stream.after_compute():
            staged = torch.empty(target.numel(), dtype=self.format.master, device=source.device)
            collectives.reduce_scatter(source, bounds, staged, group, scale=scale).wait()
            landing.copy_(staged, non_blocking=True)
            arrived = copy_stream.record()

        def add_up() -> None:
            if arrived is not None:
                arrived.synchronize()
            if landing is not target:
                target.add_(landing)

        return Pending(finish=add_up, keep=(source, staged))

    def _start_average_of_wholes(self) -> Pending:
        """Start averaging over the replicas a gradient that is all here, of earlier rounds as well."""
        gradient = self.make_gradient()
        # What was averaged before would be rounded again in each further round.
        wire = gradient.dtype if self._is_averaged else self.format.wire
        self._is_averaged = True
        source = gradient.to(wire)
        average = collectives.all_reduce(source, dist.ReduceOp.AVG, self.ranks.replica_group)
        if source is gradient:
            return average

        def widen() -> None:
            gradient.copy_(source)

        return Pending([average], widen)


def _left(name: str, remedy: str) -> ConfigError:
    """Return the error for a parameter that does not have the bucket's memory any more."""
    return ConfigError(
        f"Parameter '{name}' was given other memory after `boost`, by `.data = ...`, `.to(...)` or the like. {remedy}"
    )


def _nobody() -> None:
    """Return ``None``, as the reference to an object that is gone does."""
