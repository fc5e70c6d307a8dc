"""Brings gradients from backward into this rank's shards, bucket by bucket, as backward runs.

A *round* is one backward whose gradients are reduced. In it every active bucket is reduced once, in an order that is
fixed and the same on every rank, however the ranks' backward passes go: a bucket is started when its gradients are
complete and all buckets before it have been started, and whatever is left is started at the end of the round, with
zeros for parameters that took no part. Buckets that are not expected to be complete come last, so that no other waits
for them. Rounds add up until `Reducer.clear`. Where shards have replicas, a bucket is averaged over these as soon as it
is in its shard, while backward runs, and between the same two reductions on every rank.

Where a rank holds all of a bucket's gradient, each parameter's is added to it as soon as it comes, paused or not: to
keep it until the bucket is complete, or the pause is over, would only take memory. Elsewhere a pause leaves gradients
in ``parameter.grad``, to which autograd adds in the parameter's format. In bf16 and fp16 such a sum stops growing soon,
so that those are added up here, in fp32.

Once a gradient is taken, ``parameter.grad`` is a stand-in (`booster_zero.engine.stand_ins`). A backward that raises
leaves its round open, which other ranks wait in; it is finished before the next one begins.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass

from booster_core.errors import GradientError
from booster_core.precision import NARROW
from booster_runtime.sharding import watch_gradient_hooks
from booster_zero.engine.stand_ins import ShardedGradient, StandIns, assigned_error, holds_values
from booster_zero.engine.states import RoundState, check_transition

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torch import Tensor, nn

    from booster_runtime.collectives import Pending
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.partition import Slot


@dataclass(eq=False, slots=True)
class BucketProgress:
    """How far a bucket has come in the present round.

    Attributes:
        missing: Number of gradients that are awaited.
        waits_for_end: Whether the bucket is reduced at the end of the round only.
        gradients: The gradients that have come, flat and in the format that travels, by parameter.
        taken: The parameters that none is awaited of any more.
        is_started: Whether the bucket is being reduced.
    """

    missing: int = 0
    waits_for_end: bool = False
    gradients: dict[int, Tensor] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    is_started: bool = False

    def leave_out(self, index: int) -> None:
        """Await no gradient of a trained parameter."""
        if index not in self.taken:
            self.taken.add(index)
            self.missing -= 1


class Round:
    """The fillings of one round, in the order in which their buckets are reduced.

    A gradient asks for the first bucket that is not reduced yet, and not for all of them: there may be thousands.

    Args:
        fillings: Each bucket's.

    Attributes:
        fillings: The same by bucket; one that is not among them takes no part.
    """

    def __init__(self, fillings: Iterable[tuple[Bucket, BucketProgress]] = ()) -> None:
        self.fillings = dict(fillings)
        self._waiting = deque(self.fillings.items())

    def add(self, bucket: Bucket, filling: BucketProgress) -> None:
        """Let a bucket take part that has trained parameters only now; it comes last."""
        self.fillings[bucket] = filling
        self._waiting.append((bucket, filling))

    def take_complete(self) -> Iterator[tuple[Bucket, BucketProgress]]:
        """Yield the buckets that can be reduced now; whoever calls this starts each of them before the next."""
        while self._waiting:
            bucket, filling = self._waiting[0]
            if filling.missing > 0 or filling.waits_for_end:
                return
            self._waiting.popleft()
            yield bucket, filling

    def take_rest(self) -> Iterator[tuple[Bucket, BucketProgress]]:
        """Yield all other buckets, as above."""
        while self._waiting:
            yield self._waiting.popleft()


class InflightReductions:
    """Reductions that were started, in that order.

    Args:
        buckets: All buckets that may be reduced.

    Attributes:
        averages: Whether buckets are averaged over the replicas of their shards once they are reduced; else that is
            left to who calls `Bucket.start_average`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.averages = True
        self._reducing: deque[tuple[Bucket, Pending, Tensor]] = deque()
        self._averaging: deque[Pending] = deque()
        self.set_buckets(buckets)

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Reduce these buckets from now on. None of others is underway."""
        self._buckets = buckets
        self._spare: dict[torch.dtype, list[Tensor]] = {}

    def start(self, bucket: Bucket, gradients: Mapping[int, Tensor]) -> None:
        """Start reducing a bucket; see `Bucket.start_reduction`.

        Collective: the shard group, or the replicas, in the same order among buckets.
        """
        scratch = self._borrow(bucket)
        self._reducing.append((bucket, bucket.start_reduction(gradients, scratch), scratch))

    def wait_until(self, most: int) -> None:
        """Wait for the oldest buckets until at most so many are being reduced, and as many averaged; without gradients.

        Collective: the shards' replicas, where buckets are averaged.
        """
        while len(self._reducing) > most:
            bucket, pending, scratch = self._reducing.popleft()
            pending.wait()
            self._spare.setdefault(scratch.dtype, []).append(scratch)
            if self.averages and bucket.awaits_average:
                self._averaging.append(bucket.start_average())
        while len(self._averaging) > most:
            self._averaging.popleft().wait()

    def give_back(self) -> None:
        """Give back what reductions have borrowed; none is underway. Until the next round, activations need it."""
        self._spare = {}

    def _borrow(self, bucket: Bucket) -> Tensor:
        """Return memory to receive into; a few pieces serve all buckets of a round in turn."""
        numel, wire = bucket.scratch_numel, bucket.format.wire
        spare = self._spare.setdefault(wire, [])
        sizes = [*map(torch.Tensor.numel, spare)]
        chosen = -1  # what is too small makes room
        for position, size in enumerate(sizes):
            if size >= numel and not numel <= sizes[chosen] <= size:
                chosen = position
        taken = spare.pop(chosen) if spare else None
        return torch.empty(numel, dtype=wire) if taken is None or sizes[chosen] < numel else taken


_MOST_IN_FLIGHT = 2
"""Buckets that are underway at once. Each keeps full gradients of its size alive."""


class Reducer:
    """Reduces gradients of the buckets' parameters.

    Args:
        buckets: All buckets, in the order in which they are reduced.
        names: Names of the parameters, by number.
        overlap: Go on with backward while buckets are underway.
        agree_on_record: Called on every rank at the end of the first round, with the parameters in the order in which
            their gradients came and those whose gradients came again too late; returns the latter over all ranks.

    Parameters get a hook each.

    Attributes:
        repeated: Parameters whose gradients come several times in one backward, on any rank.
        unused_somewhere: Parameters that took no part in the first round on some rank.
        unused_anywhere: Parameters that took no part on any rank when that was last agreed on.
        underway: The reductions that were started.
        waits_in_backward: Whether backward may wait for other ranks' buckets: not if it also sends them activations.
        dropped: Parameters whose gradients a script has dropped by ``parameter.grad = None``; whoever steps empties it.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        names: Mapping[int, str],
        *,
        overlap: bool,
        agree_on_record: Callable[[list[int], set[int]], set[int]],
    ) -> None:
        self.buckets: list[Bucket] = []
        self.is_paused = False
        self.waits_in_backward = True
        self.used: set[int] = set()
        self.order: list[int] = []
        self.repeated: set[int] = set()
        self.unused_somewhere: set[int] = set()
        self.unused_anywhere: set[int] = set()
        self.num_rounds = 0
        self._agree_on_record = agree_on_record
        self._names = names
        self._overlap = overlap
        self._place: dict[int, tuple[Bucket, Slot, nn.Parameter]] = {}
        self._round = Round()
        self.underway = InflightReductions(self.buckets)
        self._state = RoundState.IDLE
        self._end_of_direct: Callable[[], object] = _nothing
        self._has_local = False
        self._local: dict[int, Tensor] = {}
        self._stand_ins = StandIns(names, self._zero_gradient)
        self.dropped: set[int] = set()
        self._late: set[int] = set()
        self._hooks: dict[int, Any] = {}
        self._unhooked: dict[int, nn.Parameter] = {}
        self.set_buckets(buckets)

    # ---- layout

    def set_buckets(self, buckets: Iterable[Bucket]) -> None:
        """Reduce these buckets from now on, in this order. Not during a round."""
        self.buckets = list(buckets)
        self._place = {
            slot.index: (bucket, slot, parameter)
            for bucket in self.buckets
            for slot, parameter in zip(bucket.plan.slots, bucket.parameters, strict=True)
        }
        self._round = Round()  # what it says of former buckets would keep their memory
        self.underway.set_buckets(self.buckets)
        self._named = [(self._names[index], parameter) for index, (_, _, parameter) in self._place.items()]
        self._unhooked = {
            index: parameter for index, (_, _, parameter) in self._place.items() if index not in self._hooks
        }
        self.watch()

    def watch(self) -> None:
        """Put hooks on parameters that are new, or have been unfrozen since."""
        reducer = weakref.ref(self)  # a hook must not keep alive what its parameter belongs to
        for index, parameter in [*self._unhooked.items()]:
            if parameter.requires_grad:
                self._hooks[index] = _hook(reducer, index, parameter)
                del self._unhooked[index]

    def before_forward(self) -> None:
        """Put hooks on what has been unfrozen, and watch those of the script, before a forward."""
        self.watch()
        with DisableTorchFunctionSubclass():
            watch_gradient_hooks(self._named, num_own=1)

    # ---- rounds

    @property
    def has_local(self) -> bool:
        """Whether backward passes of a pause have left gradients here that are not reduced yet."""
        return self._has_local

    @contextlib.contextmanager
    def guarded(self, *, ends: bool = True) -> Iterator[None]:
        """Run one backward inside; it is a round unless paused, also where no gradient comes of it on this rank.

        Args:
            ends: Wait for the round. ``False`` leaves it open until `finish` is called.

        Collective: every rank of the shard group, unless paused.
        """
        self._finish_interrupted()
        self.hide_stand_ins()
        if not self.is_paused:
            self._begin()
        try:
            yield
        except BaseException:
            if self._state is RoundState.OPEN:
                self._become(RoundState.BROKEN)
            raise
        finally:
            self.show_stand_ins()
        if self.is_paused:
            self._has_local = True
        elif ends:
            self.finish()

    def hide_stand_ins(self) -> None:
        """Take stand-ins away until `show_stand_ins`, for code that looks at gradients, as torch's compiler does."""
        self._take_dropped()
        self._stand_ins.hide()

    def show_stand_ins(self) -> None:
        """Show the stand-ins that were taken away."""
        self._stand_ins.show_again()

    def settle(self) -> None:
        """Return once every gradient that backward has produced is in the shards.

        Collective: every rank of the shard group.
        """
        self._finish_interrupted()
        self._take_dropped()
        if self._has_local:
            self._begin()
        self.finish()

    def check_assigned(self) -> None:
        """Check that no script has assigned a gradient, which the optimizer would not see. All are reduced.

        Raises:
            GradientError: If one has.
        """
        with DisableTorchFunctionSubclass():
            for index, (_, _, parameter) in self._place.items():
                gradient = parameter.grad
                if type(gradient) is ShardedGradient and gradient.added is None:
                    continue  # most are; a call of `holds_values` for each takes longer
                if holds_values(gradient):
                    raise assigned_error(self._names[index])

    def show_used(self, indices: AbstractSet[int]) -> None:
        """Show that there are gradients of parameters which any rank has used."""
        for index in self._stand_ins.not_shown(indices):
            self._stand_ins.show(index, self._place[index][2])

    def clear(self, buckets: Collection[Bucket] | None = None) -> None:
        """Forget the gradients of some buckets, or all.

        Collective: none; after a backward that raised, every rank of the shard group.
        """
        self._finish_interrupted()
        with torch.no_grad():
            self.underway.wait_until(0)
        if buckets is None:
            buckets = self.buckets
            if self._state is not RoundState.IDLE:
                self._become(RoundState.IDLE)
            self._has_local = False
            self._late.clear()
            self._round = Round()
        cleared = {slot.index for bucket in buckets for slot in bucket.plan.slots}
        self.used -= cleared
        if self._local:
            self._local = {index: each for index, each in self._local.items() if index not in cleared}
        self._stand_ins.clear(cleared)
        with DisableTorchFunctionSubclass():
            for bucket in buckets:
                bucket.drop_gradient()
                for parameter in bucket.parameters:
                    parameter.grad = None

    def zero(self, buckets: Collection[Bucket] | None = None) -> None:
        """Set the gradients of some buckets, or all, to zero; parameters that have one keep it."""
        self._take_dropped()
        for bucket in self.buckets if buckets is None else buckets:
            for slot in bucket.plan.slots:
                if slot.index in self._local:
                    self._local[slot.index].zero_()
            bucket.zero_gradient()
            for parameter in bucket.parameters:
                gradient = parameter.grad
                if type(gradient) is ShardedGradient:
                    gradient.take_added()
                elif gradient is not None:  # of a pause, which is one of the step's as well
                    gradient.zero_()

    def _zero_gradient(self, index: int) -> None:
        """Set the gradient of one parameter to zero."""
        if index in self._local:
            self._local[index].zero_()
        self._place[index][0].zero_gradient_of(index)

    def _take_dropped(self) -> None:
        """Drop the gradients of parameters whose ``grad`` somebody has set to ``None``."""
        dropped, are_all = self._stand_ins.take_dropped()
        if are_all and not self._has_local:
            self.clear()
        for index in dropped:
            self._drop(index)

    def _drop(self, index: int) -> None:
        self._local.pop(index, None)
        self.used.discard(index)
        self._place[index][0].zero_gradient_of(index)
        self.dropped.add(index)

    @property
    def is_recording(self) -> bool:
        """Whether this is the first round, of which ranks remember what it shows."""
        return not self.num_rounds

    def _become(self, state: RoundState) -> None:
        check_transition(self._state, state)
        self._state = state

    def _begin(self, state: RoundState = RoundState.OPEN) -> None:
        if self._state is not RoundState.IDLE:
            return
        self.watch()
        self._become(state)
        waiting = self._buckets_of(self.repeated)
        with DisableTorchFunctionSubclass():
            # What was frozen since may have a gradient of the pause, which no bucket is complete without.
            frozen = self._buckets_frozen_later() if self._has_local else set()
            self._has_local = False
            self._round = Round(
                (bucket, BucketProgress(missing, bucket in waiting or bucket in frozen))
                for bucket in self._in_order()
                if (missing := bucket.num_trained) or bucket in frozen
            )

    def _buckets_frozen_later(self) -> set[Bucket]:
        """Return the buckets of parameters that were trained at some time, and are frozen now; alike on every rank."""
        places = (self._place[index] for index in self._hooks if index in self._place)
        return {bucket for bucket, _, parameter in places if not parameter.requires_grad}

    def _in_order(self) -> list[Bucket]:
        """Return the buckets in the order of the next round: those that others would wait for come last."""
        unsure = self.repeated | self.unused_somewhere | self.unused_anywhere
        last = self._buckets_of(unsure, is_trained=True)
        return sorted(self.buckets, key=last.__contains__) if last else self.buckets

    def _buckets_of(self, indices: Iterable[int], *, is_trained: bool = False) -> set[Bucket]:
        places = [self._place[index] for index in indices if index in self._place]
        return {bucket for bucket, _, parameter in places if parameter.requires_grad or not is_trained}

    def finish(self) -> None:
        """End the round: start what is left, and wait for all of it.

        Collective: every rank of the shard group; none where no round is open.
        """
        if self._state is RoundState.IDLE:
            return
        self._start_rest()
        self._become(RoundState.IDLE)
        self.num_rounds += 1
        if self.num_rounds == 1:
            self._end_recording()

    def _end_recording(self) -> None:
        """Let the ranks agree on what the first round has shown."""
        self.repeated = self._agree_on_record(self.order, self._late)
        if self.repeated:  # what came after its bucket had left
            self._late.clear()
            self._begin()
            self._start_rest()
            self._become(RoundState.IDLE)

    @torch.no_grad()
    def _start_rest(self) -> None:
        with DisableTorchFunctionSubclass():
            self._take_rest()
        self.underway.wait_until(0)
        self.underway.give_back()

    def _take_rest(self) -> None:
        for bucket, filling in self._round.take_rest():
            for slot, parameter in zip(bucket.plan.slots, bucket.parameters, strict=True):
                if slot.index in self._local or holds_values(parameter.grad):
                    self._take(bucket, filling, slot, parameter)
            self._start(bucket, filling)

    # ---- gradients

    # Backward calls these four for each parameter, so they call little.

    def on_gradient(self, index: int, parameter: nn.Parameter) -> None:
        """Take the gradient that backward has just accumulated in a parameter; without gradients and subclasses."""
        if not parameter.requires_grad:
            return  # what was frozen after forward gets no gradient
        bucket, slot, _ = self._place[index]
        if self.is_paused:
            self._keep(bucket, slot, parameter)
            return
        if self._state is not RoundState.OPEN and self._end_of_direct() is None:
            self._begin_direct(parameter)
        fillings = self._round.fillings
        if bucket not in fillings:
            self._round.add(bucket, BucketProgress(len(bucket.parameters), bucket in self._buckets_of(self.repeated)))
        filling = fillings[bucket]
        if filling.is_started:
            self._come_late(index)
            return
        is_new = index not in filling.taken
        if is_new and not self.num_rounds:
            self.order.append(index)
        self._take(bucket, filling, slot, parameter)
        if is_new:
            filling.missing -= 1
            if filling.missing <= 0:
                self._start_complete()

    def leave_out(self, indices: Iterable[int]) -> None:
        """Await no gradient of these parameters in this round: backward has passed all their uses."""
        if self._state is not RoundState.IDLE:
            for index in indices:
                bucket, _, parameter = self._place[index]
                filling = self._round.fillings.get(bucket)
                if filling is not None and parameter.requires_grad:
                    filling.leave_out(index)
            self._start_complete()

    def _begin_direct(self, parameter: nn.Parameter) -> None:
        """Begin a round for a script that called ``loss.backward()`` itself; autograd tells when that has ended.

        Args:
            parameter: The first one that got a gradient.
        """
        gradient, parameter.grad = parameter.grad, None  # which is none of an earlier round
        self._finish_interrupted()
        self._begin(RoundState.DIRECT)
        parameter.grad = gradient
        end = functools.partial(self._end_direct)
        # Autograd keeps it until backward has ended, also where that raises and nothing is called.
        self._end_of_direct = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)  # noqa: SLF001 - as DDP and FSDP do

    def _end_direct(self) -> None:
        self._end_of_direct = _nothing
        self.finish()

    def _finish_interrupted(self) -> None:
        """Finish the round of a backward that raised.

        Collective: every rank of the shard group, where there is such a round; else none.
        """
        raised = self._state is RoundState.DIRECT and self._end_of_direct() is None
        if raised or self._state is RoundState.BROKEN:
            self.finish()

    def _come_late(self, index: int) -> None:
        if self.is_recording:
            self._late.add(index)
            return
        msg = (
            f"The gradient of '{self._names[index]}' was changed after it had been reduced over the ranks: backward "
            "reached it several times in one call, which it did not do in the first step. Use "
            "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
        )
        raise GradientError(msg)

    def _keep(self, bucket: Bucket, slot: Slot, parameter: nn.Parameter) -> None:
        """Add the gradient of a pause to those before; where it is wide, autograd does that in ``parameter.grad``."""
        self._has_local = True
        if not bucket.adds_at_once and bucket.format.working not in NARROW and not self._stand_ins.has(slot.index):
            return
        gradient = self._gradient_of(slot, parameter)
        assert gradient is not None, "asked for a gradient that is not there"
        if bucket.adds_at_once:
            bucket.add_gradient(slot.index, gradient)
            return
        before = self._local.get(slot.index)
        self._local[slot.index] = gradient if before is None else _sum(before, gradient)

    def _take(self, bucket: Bucket, filling: BucketProgress, slot: Slot, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient, without a copy where it has the format that travels."""
        filling.taken.add(slot.index)
        gradient = self._gradient_of(slot, parameter)
        if bucket.adds_at_once:
            assert gradient is not None, "asked for a gradient that is not there"
            bucket.add_gradient(slot.index, gradient)
            return
        kept = self._local.pop(slot.index, None) if self._local else None
        if kept is not None:
            gradient = kept if gradient is None else _sum(kept, gradient)
        assert gradient is not None, "asked for a gradient that is not there"
        if gradient.dtype is not bucket.format.wire:
            gradient = gradient.to(bucket.format.wire)
        flat = gradient.reshape(-1)
        gradients, index = filling.gradients, slot.index
        gradients[index] = gradients[index] + flat if index in gradients else flat

    def _gradient_of(self, slot: Slot, parameter: nn.Parameter) -> Tensor | None:
        """Return what backward has accumulated in a parameter, and show its stand-in instead; without subclasses."""
        gradient = parameter.grad
        if type(gradient) is ShardedGradient:  # in a backward that a script called itself
            gradient = gradient.take_added()
            self._stand_ins.show(slot.index, parameter)
        elif self._stand_ins.show(slot.index, parameter):
            self._drop(slot.index)  # a script did, before this backward
        self.used.add(slot.index)
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    def _start_complete(self) -> None:
        if self._overlap or self.waits_in_backward:
            for bucket, filling in self._round.take_complete():
                self._start(bucket, filling)

    def _start(self, bucket: Bucket, filling: BucketProgress) -> None:
        gradients, filling.gradients, filling.is_started = filling.gradients, {}, True
        self.underway.start(bucket, gradients)
        if self.waits_in_backward:
            self.underway.wait_until(_MOST_IN_FLIGHT if self._overlap else 0)


def _hook(reducer: weakref.ref[Reducer], index: int, parameter: nn.Parameter) -> Any:
    def take(parameter: nn.Parameter) -> None:
        owner = reducer()
        if owner is None:
            return
        with DisableTorchFunctionSubclass():
            if not torch.is_grad_enabled():  # which is quicker to ask than to change
                owner.on_gradient(index, parameter)
                return
            with torch.no_grad():  # backward with ``create_graph=True``
                owner.on_gradient(index, parameter)

    return parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]


def _sum(kept: Tensor, gradient: Tensor) -> Tensor:
    """Return the sum of two gradients, in fp32 where they are narrower; the first may be written to."""
    return (kept.float() if kept.dtype in NARROW else kept).add_(gradient)


def _nothing() -> None:
    """Return ``None``, as the reference to an object that is gone does."""
