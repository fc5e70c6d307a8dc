"""When whole values of buckets are here: gathered before their parameters are used, and released when they are not.

What a bucket keeps always (`Keep`) is gathered by the step that has changed it; with ``overlaps`` that goes on after
the step, and the first use of what it brings waits. Everything else is gathered for each use in a forward or a
backward, a *phase*: in the order of the last phase of its kind, some of it ahead. Until its values are here, a
parameter is absent (`booster_runtime.memory.absent`), so that whatever reads or writes one gathers, waits or raises,
from whichever thread.

What can't wait is a read of memory by a view, NumPy's say, that was made before a step.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import insort
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_core.ranks import NamedCall
from booster_runtime import collectives
from booster_runtime.compiling import is_compiled
from booster_runtime.sharding import parametrized_in_forward
from booster_zero.engine.bucket import Bucket
from booster_zero.engine.layout import Layout
from booster_zero.engine.memory import BufferPool
from booster_zero.engine.states import Keep, WholeState
from booster_zero.engine.uses import OrderCheck, Timeline, WriteWatch, changed_error

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from booster_runtime.collectives import Pending
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.memory import Memory
    from booster_zero.engine.partition import Format


_BACKWARD = "backward"


class Gatherer:
    """Gathers a model's buckets before they are used.

    Args:
        model: The user's model.
        ranks: The ranks that share its buckets.
        memory: Keeps this rank's part of these.
        bucket_bytes: Size of a bucket in the format in which its gradients travel.
        overlaps: Let a step return while what is always whole is still being gathered.

    Attributes:
        layout: The buckets and their parameters.
        ranks: As given.
        memory: As given.
        order: Lets ranks compare what they are about to do together; ``None`` where no use concerns other ranks.
        timeline: The order of uses in phases.
        use_in_forward: Gathers for a use of a parameter, given by its number, while a forward runs; ``None`` while
            none does.
        addresses: Where whole values are or were that have been gathered, in order.
        bucket_at: Whose they are; a bucket that has another ``address`` by now has been released.
    """

    def __init__(
        self, model: nn.Module, ranks: ShardingRanks, *, memory: Memory, bucket_bytes: int, overlaps: bool = False
    ) -> None:
        self.ranks = ranks
        self.memory = memory
        self._pool: BufferPool | None = None
        self.timeline = Timeline()
        self.layout = Layout(model, ranks, self._maker(), bucket_bytes=bucket_bytes)
        self.order: OrderCheck | None = None
        self.use_in_forward: Callable[[int], AbstractContextManager[None] | None] | None = None
        self._overlaps = overlaps
        self._pending: dict[Bucket, Pending] = {}  # of what is always whole
        weakref.finalize(self, _wait_quietly, self._pending)  # gloo's threads write into buckets until then
        self._set_in_forward = {
            self.layout.index_of[id(parameter)]
            for module in parametrized_in_forward(model)
            for parameter in module.parameters(recurse=False)
        }
        self._watch = WriteWatch(self.layout.names, self._set_in_forward)
        self._release_fraction = 0.0
        self._max_prefetch = 0
        self._max_ahead_bytes: int | None = None
        self._ends_with_backward = False
        self._used: dict[int, Bucket] = {}
        self._last: Bucket | None = None
        self._ahead: dict[int, Bucket] = {}
        self._held: dict[object, list[Bucket]] = {}
        self._changed: Mapping[str, str] = {}
        self._number_of: dict[Bucket, int] = {}
        self.addresses: list[int] = []
        self.bucket_at: dict[int, Bucket] = {}

    def shard_all(
        self,
        format_of: Callable[[nn.Parameter], Format],
        *,
        max_prefetch: int,
        max_ahead_bytes: int | None = None,
        release_fraction: float = 1.0,
        lazy: Container[int] = (),
        units: Sequence[Sequence[int]] | None = None,
        remedy: str,
    ) -> None:
        """Lay all parameters out, which become absent, and gather them for each use from now on.

        On a single rank, whose shards are whole, they stay as they are, unless its memory moves them.

        Args:
            format_of: Formats and devices of a parameter.
            max_prefetch: How many buckets are gathered ahead of their use.
            max_ahead_bytes: What they may take at once, beyond the first; ``None`` for no limit. Every rank's is the
                same.
            release_fraction: Fraction of the parameters whose buckets are released after use; others stay until the
                step.
            lazy: Numbers of parameters that have no values yet.
            units: Numbers of the parameters that share no bucket with others, such as those of a layer, for each
                unit; ``None`` for one unit of all.
            remedy: What to do where ranks use other parameters, for the error.

        Collective: none; values are taken from this rank's parameters.
        """
        every = self.layout.every
        if self.ranks.shard_size == 1 and not self.memory.moves:
            self.layout.add_missing(every, format_of)
            return
        self._max_prefetch, self._max_ahead_bytes = max_prefetch, max_ahead_bytes
        self._release_fraction = release_fraction
        bucket_bytes = self.layout.bucket_bytes
        self._pool = BufferPool(least_bytes=bucket_bytes)
        valued = frozenset(index for index in every if index not in lazy)
        self.layout.make = self._maker(valued)
        formats = {index: format_of(parameter) for index, parameter in every.items()}
        for unit in self._whole_layers(formats) if units is None else units:
            self.layout.add({index: every[index] for index in unit}, {index: formats[index] for index in unit})
        self.layout.make = self._maker(())  # the layout writes to buckets that take the place of others
        self.order = OrderCheck(self.ranks, self.layout.names, remedy, next(iter(formats.values())).device)
        self._enumerate()

    def _whole_layers(self, formats: Mapping[int, Format]) -> list[list[int]]:
        """Return all parameters in groups of one bucket each, as far as layers fit.

        A bucket that ends within a layer would be gathered again for parameters that are used in another order than
        they are registered in, such as those of norms.
        """
        layers: dict[str, list[int]] = {}
        for index, name in self.layout.names.items():
            parts = name.split(".")
            at = next((number for number, part in enumerate(parts, 1) if part.isdigit()), len(parts))
            layers.setdefault(".".join(parts[:at]), []).append(index)
        groups: list[list[int]] = []
        held = 0
        for layer in layers.values():
            taken = sum(self.layout.every[index].numel() * formats[index].wire.itemsize for index in layer)
            if not groups or held + taken > self.layout.bucket_bytes:
                groups.append([])
                held = 0
            groups[-1] += layer
            held += taken
        return groups

    def _maker(self, valued: Container[int] | None = None) -> Callable[..., Bucket]:
        """Return what makes buckets; see `Bucket` for ``valued``."""
        options: dict[str, Any] = {"memory": self.memory, "pool": self._pool, "valued": valued}
        user = weakref.ref(self)  # the layout, which keeps this, must not keep alive whose it is

        def make(*described: Any) -> Bucket:
            return Bucket(*described, user=user(), **options)

        return make

    def _enumerate(self) -> None:
        self._number_of = {bucket: number for number, bucket in enumerate(self.layout.buckets)}
        # What comes last in forward is what backward needs first: it gains most from staying.
        to_release = self._release_fraction * sum(bucket.plan.numel for bucket in self.layout.buckets)
        if self._pool is not None:  # buckets may take more than was asked: one is released while another one is
            self._pool.most_idle_bytes = 2 * max((each.whole_bytes for each in self.layout.buckets), default=0)
        for bucket in self.layout.buckets:
            bucket.keep = Keep.IN_USE if to_release > 0 else Keep.UNTIL_STEP
            to_release -= bucket.plan.numel

    @property
    def gathers_on_use(self) -> bool:
        """Whether parameters are gathered for each use; else they are always whole."""
        return self._pool is not None

    # ---- phases

    def begin(self, kind: Hashable) -> None:
        """Begin a phase: a forward or a backward.

        Collective: every rank of the shard group.
        """
        with _Plainly():
            self._let_go_of_all()
            self._last = None
            self._ends_with_backward = False  # that one may have raised
            self.timeline.begin(kind)
            self._look_ahead()

    def end(self, *, goes_back: bool = False) -> None:
        """End a phase: release what nobody pins.

        Args:
            goes_back: A backward is expected to follow, which begins with what was used last.
        """
        if self.timeline.kind == _BACKWARD:
            self._let_go_of_all()
        self.timeline.end()
        self._last = None
        with _Plainly():
            self.release_unused(keep=1 if goes_back else 0)
            for bucket in self._used.values():
                if bucket.is_gathered and not bucket.pins:
                    bucket.hide()

    def end_with_backward(self) -> None:
        """See to it that the backward that is running ends as a phase does, where a script has called it itself."""
        if self.timeline.kind is None and not self._ends_with_backward:
            self._ends_with_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)  # noqa: SLF001 - as DDP does

    def _end_of_backward(self) -> None:
        self._ends_with_backward = False
        self.end()

    # ---- uses

    def use(self, bucket: Bucket) -> None:
        """Return once a bucket's parameters can be read. They can until others are used, or as long as it is pinned.

        Collective: every rank of the shard group, in the same order.
        """
        if bucket is self._last and bucket.state is WholeState.GATHERED:
            return  # most uses follow another one of the same bucket
        with _Plainly():
            self._prepare(bucket)
            if bucket.state is not WholeState.GATHERED:
                bucket.finish_gather()
            self._look_ahead()

    def use_whole(self, bucket: Bucket) -> Tensor:
        """Return a bucket's whole values, as `use` gathers them; its parameters need not be readable.

        Collective: every rank of the shard group, in the same order.
        """
        if bucket is self._last and bucket.arriving is None and bucket.whole is not None:
            return bucket.whole
        if bucket is not self._last or bucket.whole is None:
            with _Plainly():
                self._prepare(bucket)
                self._look_ahead()
        return bucket.arrived()

    def hold(self, holder: object, buckets: Sequence[Bucket]) -> None:
        """Gather buckets, and keep them until `let_go`; in between, uses of them are no business of other ranks.

        Args:
            holder: Who needs them; holds nothing yet, or the same.
            buckets: The buckets, in the same order on every rank.

        Collective: every rank of the shard group, in the same order.
        """
        if holder in self._held:
            return
        for bucket in buckets:
            self.use(bucket)
            bucket.pins += 1
        self._held[holder] = list(buckets)

    def let_go(self, holder: object) -> None:
        """Let buckets be released again that somebody holds, if anything."""
        for bucket in self._held.pop(holder, ()):
            bucket.pins = max(bucket.pins - 1, 0)

    def _let_go_of_all(self) -> None:
        for holder in [*self._held]:
            self.let_go(holder)

    def _prepare(self, bucket: Bucket) -> None:
        """Take note of a use of a bucket, and start to gather it."""
        if self._held and any(bucket in held for held in self._held.values()):
            return  # other ranks may use other parts of what is held
        self._last = bucket
        number = self._number_of[bucket]
        self.timeline.note(number)
        if number in self._ahead:
            del self._ahead[number]
        if number in self._used:
            del self._used[number]
        self._used[number] = bucket  # the last one used is the last one released
        if bucket.state is not WholeState.GATHERED:
            self.release_unused(keep=1)
            if bucket.state is WholeState.SHARDED:
                self._start_gather(bucket)

    def _look_ahead(self) -> None:
        """Start gathering what is expected next."""
        if self.ranks.shard_size == 1:
            return
        for number in self.timeline.upcoming(self._max_prefetch):
            bucket = self.layout.buckets[number]
            if self._ahead and len(self._ahead) >= self._max_prefetch:
                return
            if bucket.state is WholeState.SHARDED:
                # Every rank must decide alike, so this looks at whole buckets, and at no memory of this rank's.
                if self._ahead and self._max_ahead_bytes is not None:
                    taken = sum(each.whole_bytes for each in self._ahead.values()) + bucket.whole_bytes
                    if taken > self._max_ahead_bytes:
                        return
                self._ahead[number] = bucket
                self._start_gather(bucket)

    def _start_gather(self, bucket: Bucket) -> None:
        if self.order is not None:
            self.order.note(bucket)
        bucket.start_gather()
        if bucket.address not in self.bucket_at:
            insort(self.addresses, bucket.address)
        self.bucket_at[bucket.address] = bucket

    def release_unused(self, keep: int) -> None:
        """Release buckets that nobody pins, the least recently used first, until so many are left."""
        loose = [
            number
            for number, bucket in self._used.items()
            if not bucket.pins and bucket.keep is Keep.IN_USE and bucket.whole is not None
        ]
        for number in loose[:-keep] if keep else loose:
            self._used.pop(number).release()
        if self.timeline.kind is None:
            for bucket in self._ahead.values():  # nobody came for them
                bucket.release()
            self._ahead = {}

    def release_all(self) -> None:
        """Release every bucket that is not always whole, pinned or not; what was written to it is not looked for."""
        if self.gathers_on_use:
            self._watch.forget()
        for bucket in self.layout.buckets if self.gathers_on_use else ():
            bucket.release()
            bucket.pins = 0
        self._held = {}
        self._used = {}
        self._ahead = {}

    # ---- what buckets tell, see `User`

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def on_use(self, bucket: Bucket, index: int, what: str) -> AbstractContextManager[None] | None:
        """Gather what is used in a forward or a backward, and wait for what a step has left on its way.

        Raises:
            ConfigError: If none is running.

        Collective: every rank of the shard group, in the same order; none where the step has gathered.
        """
        if bucket in self._pending:
            self._end(bucket)
            return None
        if self.use_in_forward is not None:
            return self.use_in_forward(index)
        if not is_in_backward():
            msg = (
                f"Parameter '{self.layout.names[index]}' is kept in shards outside of the model's forward and "
                f"backward, so that `{what}` finds no values. Read values inside of `with model.whole_parameters():` "
                "or from `model.state_dict()` of the boosted model, and change them inside of `with "
                "model.whole_parameters(writes=True):`, each on every rank. `booster.save_model` writes files, "
                "`booster_runtime.ema(booster, model)` keeps an average; copy the model inside of such a block, or "
                "before `boost`. What replaces parameters, as `resize_token_embeddings`, comes before `boost`."
            )
            raise ConfigError(msg)
        self.use(bucket)
        self.end_with_backward()
        return None

    def on_show(self, bucket: Bucket) -> None:
        """Remember what the parameters of a bucket are like, where what is written to them would be lost."""
        if bucket.keep is not Keep.ALWAYS:
            kind = self.timeline.kind
            # Of a forward with gradients alone: evaluation would pay for it without end.
            self._watch.note_shown(bucket, sums=isinstance(kind, tuple) and kind[0] == "forward" and kind[2])

    def on_hide(self, bucket: Bucket) -> None:
        """Find those of them that were changed."""
        self._watch.note_hidden(bucket)

    # ---- what a step has left on its way

    @property
    def is_underway(self) -> bool:
        """Whether a step has left any."""
        return bool(self._pending)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Return once it is here.

        Collective: none; the gathers were entered when they were started.
        """
        while self._pending:
            self._end(next(iter(self._pending)))

    @contextlib.contextmanager
    def during_forward(self, model: nn.Module) -> Iterator[None]:
        """Run the model's forward inside: its uses of parameters wait, and its end waits for the rest."""
        if not self._pending:
            yield
            return
        if any(map(is_compiled, model.modules())):  # its graph would break at each use
            self.wait()
        try:
            yield
        finally:
            self.wait()

    def _end(self, bucket: Bucket) -> None:
        with NamedCall("gather of parameters"):
            bucket.finish_gather()
        bucket.note_arrived()
        del self._pending[bucket]

    # ---- what the engine tells

    def in_order_of_forward(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Return all buckets in the order in which forward is expected to use them.

        What is gathered for each use is laid out in that order, what is always whole in the order of backward.
        """
        return buckets if self.gathers_on_use else buckets[::-1]

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Let the layout exchange buckets inside; what `ShardedModel.whole_parameters` holds, it holds again.

        Collective: every rank of the shard group, where buckets are held; else none.
        """
        self.wait()
        held = {slot.index: bucket.pins for bucket in self.layout.buckets for slot in bucket.plan.slots if bucket.pins}
        for bucket in self.layout.buckets:
            if bucket.pins:
                bucket.write_back()
        self.release_all()
        yield
        if self.gathers_on_use:
            self._last = None
            self._enumerate()
            self.timeline.forget()
        for bucket in self.layout.buckets:
            bucket.pins = held.get(bucket.plan.slots[0].index, 0)
            if bucket.pins:
                self.use(bucket)

    def begin_backward(self) -> None:
        """Begin the phase of backward, and wait for what a step has left on its way.

        Collective: every rank of the shard group, where parameters are gathered for each use; else none.
        """
        self.wait()
        if self.gathers_on_use:
            self.memory.moment("backward")
            self.begin(_BACKWARD)

    def end_backward(self) -> None:
        """End it, also where it raised: release what nobody pins."""
        if self.gathers_on_use:
            self.end()

    def begin_step(self) -> None:
        """Take in what the script has written into parameters of which this rank has all values.

        Raises:
            ConfigError: If a parameter was given other memory since it was laid out.
        """
        self.wait()
        if self.gathers_on_use:
            self.memory.moment("step")
        for bucket in self.layout.buckets:
            if not self.gathers_on_use:
                bucket.check_place(self.layout.names)
            elif bucket.is_gathered:
                self._watch.note_hidden(bucket)  # before the step changes the shard
        if not self.gathers_on_use:
            self._adopt_writes()

    def _adopt_writes(self) -> None:
        """Take in what somebody else has written into the parameters since the last update, such as loaded values.

        Where the optimizer's values are on the host, the device tells of all buckets at once what is to be brought
        there. The host waits for backward then, as it does for gradients.
        """
        flags = {bucket: flag for bucket in self.layout.buckets if (flag := bucket.is_written()) is not None}
        away = [bucket for bucket in flags if bucket.format.step_device != bucket.format.device]
        if away:
            told = torch.empty(len(away), dtype=torch.bool, pin_memory=True)
            told.copy_(torch.stack([flags[bucket] for bucket in away]), non_blocking=True)
            torch.accelerator.current_stream().record_event().synchronize()
            flags.update(zip(away, told, strict=True))
        for bucket, flag in flags.items():
            if flag.device.type != "cpu" or flag:  # asking a device takes longer
                bucket.take_working_values(flag)

    def end_step(self, published: Mapping[Bucket, Pending]) -> None:
        """Let the next use of buckets see what the optimizer has updated.

        Args:
            published: What `Bucket.publish` has returned for them.
        """
        stays = not self.gathers_on_use
        for bucket, pending in published.items():
            if stays and not self._overlaps:
                pending.wait()
                bucket.note_arrived()
            if not stays and bucket.ranks.shard_size > 1:
                bucket.release()
        for bucket in published:
            bucket.increment_versions()
        if stays and self._overlaps:
            for bucket, pending in published.items():
                self._pending[bucket] = pending
                bucket.await_gather(pending)

    def publish(self, buckets: Sequence[Bucket]) -> None:
        """Bring what is updated of some buckets into every rank's parameters.

        Collective: the shard group.
        """
        self.wait()
        published = {bucket: bucket.publish() for bucket in buckets}
        for bucket, pending in published.items():
            pending.wait()
            bucket.note_arrived()
            bucket.increment_versions()

    def flags(self) -> bytes:
        """Return what is told of this rank's uses of parameters since the last call; as many bytes on every rank.

        Collective: none; `check_uses` takes the largest of each byte over all that hold the same parameters.
        """
        if self.order is None:
            return b""
        self._changed = self._watch.take_found()
        self._watch.note_step()
        return bytes([bool(self._changed)]) + self.order.flags()

    def check_uses(self, most: bytes) -> None:
        """Check that ranks have gathered the same buckets in one order, and that nobody wrote to them.

        Args:
            most: The largest of each byte of `flags` over ranks.

        Raises:
            ConfigError: If they have not, so that what they computed with was not what they meant; or if a parameter
                was changed by hand on any rank.

        Collective: all that hold the same parameters, if that is so; else none.
        """
        if self.order is None:
            return
        if most[0]:
            of_ranks = collectives.all_gather_object(self._changed, self.ranks.holders)
            self._raise_changes(dict(enumerate(of_ranks)))
        self.order.check(most[1:])

    # ---- changes

    def take_changes(self) -> ConfigError | None:
        """Return the error for parameters that were changed by hand on this rank, and forget them."""
        return changed_error({self.ranks.shard_rank: self._watch.take_found()})

    def find_writes(self) -> None:
        """Find what was written to parameters, all of which are here, also through ``.data``."""
        for bucket in self.layout.buckets:
            self._watch.compare(bucket)

    def tell_changes(self) -> None:
        """Raise on every rank for parameters that were changed by hand on any.

        Raises:
            ConfigError: If there are any.

        Collective: every rank of the shard group.
        """
        found = self._watch.take_found()
        self._raise_changes(dict(enumerate(collectives.all_gather_object(found, self.ranks.gathering))))

    def _raise_changes(self, found: Mapping[int, Mapping[str, str]]) -> None:
        if (error := changed_error(found)) is not None:
            raise error


class _Plainly:
    """Leaves inference mode, whose memory could not be used in training later, and is seen by no mode or transform.

    Each gather enters it: torch's own contexts would be four objects more.
    """

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        private: Any = torch._C  # noqa: SLF001 - as torch's own modes do
        self._guards = private._InferenceMode(False), private.DisableTorchFunction(), private._DisableFuncTorch()  # noqa: FBT003, SLF001
        for guard in self._guards:
            guard.__enter__()
        private._set_grad_enabled(False)  # noqa: FBT003, SLF001 - what the first guard takes back, too

    def __exit__(self, *raised: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def is_in_backward() -> bool:
    """Whether autograd is running on this thread, as it is when checkpointed layers are recomputed."""
    return int(torch._C._current_graph_task_id()) != -1  # noqa: SLF001 - no public name


def _wait_quietly(pending: dict[Bucket, Pending]) -> None:
    with contextlib.suppress(RuntimeError):
        for each in pending.values():
            each.wait()
    pending.clear()
