"""All chunks of one model: which one holds a parameter, gathering chunks before use and releasing them after."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors
from booster_runtime import collectives
from booster_runtime.sharding import between_hosts
from booster_zero.engine.buffer_pool import BufferPool
from booster_zero.engine.layout import Layout
from booster_zero.engine.states import Keep, WholeState
from booster_zero.gathering.order import Chunk, OrderCheck
from booster_zero.gathering.timeline import Timeline
from booster_zero.gathering.watch import ChangeWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from booster_runtime.collectives import Pending
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.formats import Format
    from booster_zero.engine.memory import Memory


_BACKWARD = "backward"
_64_BITS = (1 << 64) - 1


class ChunkManager:
    """Keeps the model's parameters in chunks.

    Args:
        model: The user's model, with values on this rank's device; its parameters become absent.
        ranks: The ranks that share the chunks.
        format_of: Formats and places of a parameter.
        chunk_bytes: Size of a chunk in the format in which its gradients travel.
        max_prefetch: How many chunks are gathered ahead of their use.
        max_ahead_bytes: What they may take at once, beyond the first; ``None`` for no limit. Every rank's is the same.
        shard_param_frac: Fraction of the parameters whose chunks are released after use.
        memory: Keeps the chunks' blocks.
        lazy: Numbers of parameters that have no values yet.
        units: Numbers of the parameters that share no chunk with others, such as those of a layer, for each unit;
            ``None`` for one unit of all, which is laid out again by first use.
        remedy: What to do where ranks use other parameters, for the error.
        debug: Compare the values of parameters before and after each use at all times, not some in the first phases.

    Attributes:
        parameters: By number.
        names: Their names in the user's model, by number.
        layout: The chunks and their parameters.
        first_uses: The parameters in the order of their first use, until they have been laid out by it; ``None`` also
            where the order makes no difference.
        order: Lets ranks compare what they are about to do together.
        is_laid_out_again: Whether that has happened since this was last set to ``False``.
        layouts: How often parameters have been laid out.
        keeps_all: Whether this rank has all values where it computes, so that no use waits for any.
        is_underway: Whether a step has left gathers underway; none does.
        use_in_forward: Gathers for a use of a parameter, given by its number, while a forward runs; ``None`` while
            none does.
    """

    is_underway = False

    def __init__(
        self,
        model: nn.Module,
        ranks: ShardingRanks,
        format_of: Callable[[nn.Parameter], Format],
        *,
        chunk_bytes: int,
        max_prefetch: int,
        max_ahead_bytes: int | None = None,
        shard_param_frac: float,
        memory: Memory,
        lazy: Container[int] = (),
        units: Sequence[Sequence[int]] | None = None,
        remedy: str,
        debug: bool = False,
    ) -> None:
        self.ranks = ranks
        self.memory = memory
        self.timeline = Timeline()
        self.parameters: dict[int, nn.Parameter] = {}
        self.names: dict[int, str] = {}
        self.index_of: dict[int, int] = {}
        named = NamedTensors.of(model)
        for index, parameter in enumerate(model.parameters()):
            self.parameters[index] = parameter
            self.names[index] = named.name_of[id(parameter)]
            self.index_of[id(parameter)] = index
        self._watch = ChangeWatch(self.names, is_thorough=debug)
        self.use_in_forward: Callable[[int], AbstractContextManager[None] | None] | None = None
        self._ends_with_backward = False
        self.order = OrderCheck(ranks, remedy)
        self.keeps_all = ranks.shard_size == 1 and not memory.moves
        self.first_uses: dict[int, None] | None = None if self.keeps_all or units is not None else {}
        self._max_prefetch = max_prefetch
        self._has_looked_ahead = False
        self._max_ahead_bytes = max_ahead_bytes
        self.is_laid_out_again = False
        self.layouts = 0
        self._shard_param_frac = shard_param_frac
        self._pool = BufferPool(least_bytes=chunk_bytes, most_idle_bytes=2 * chunk_bytes)
        self._used: dict[int, Bucket] = {}
        self._last: Bucket | None = None
        self._ahead: dict[int, Bucket] = {}
        self._held: dict[object, list[Bucket]] = {}
        self._gathered = 0
        self._chunk_of: dict[int, Bucket] = {}
        self._number_of: dict[Bucket, int] = {}
        self._valued = frozenset(index for index in self.parameters if index not in lazy)
        self.layout = Layout(ranks, self._make, bucket_bytes=chunk_bytes)
        formats = {index: format_of(parameter) for index, parameter in self.parameters.items()}
        for unit in [[*self.parameters]] if units is None else units:
            of_unit = {index: self.parameters[index] for index in unit}
            self.layout.add(of_unit, {index: formats[index] for index in unit})
        self._enumerate()

    def _make(self, *described: Any) -> Bucket:
        # Chunks that are laid out again are written to by the layout.
        valued = () if self._number_of else self._valued
        return Chunk(self.order, *described, memory=self.memory, pool=self._pool, user=self, valued=valued)

    def _enumerate(self) -> None:
        self._number_of = {chunk: number for number, chunk in enumerate(self.layout.buckets)}
        # What comes last in forward is what backward needs first: it gains most from staying.
        to_release = self._shard_param_frac * sum(chunk.plan.numel for chunk in self.layout.buckets)
        for chunk in self.layout.buckets:
            chunk.keep = Keep.UNTIL_STEP if self.keeps_all or to_release <= 0 else Keep.IN_USE
            to_release -= chunk.plan.numel
        self._chunk_of = {slot.index: chunk for chunk in self.layout.buckets for slot in chunk.plan.slots}
        self.layouts += 1

    def chunk_of(self, index: int) -> Bucket:
        """Return the chunk that holds a parameter."""
        return self._chunk_of[index]

    def chunk_holding(self, address: int) -> Bucket | None:
        """Return the chunk whose whole values have an address, if one has."""
        for chunk in self._used.values():
            whole = chunk.whole
            if whole is not None and 0 <= address - whole.data_ptr() < chunk.whole_bytes:
                return chunk
        return None

    # ---- use

    def begin(self, kind: Hashable) -> None:
        """Begin a phase: a forward or a backward.

        Raises:
            ConfigError: If a parameter was changed by hand.

        Collective: every rank of the shard group.
        """
        with _plainly():
            self.check_changes()
        self._let_go_of_all()
        self._last = None
        self._ends_with_backward = False  # that one may have raised
        self.timeline.begin(kind)
        if self.keeps_all:
            self.use_all()
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
        with _plainly():
            self.release_unused(keep=1 if goes_back else 0)
            for chunk in self._used.values():
                if chunk.is_gathered and not chunk.pins:
                    chunk.hide()

    def use(self, chunk: Bucket) -> None:
        """Return once a chunk's parameters can be read. They can until others are used, or as long as it is pinned.

        Collective: every rank of the shard group, in the same order.
        """
        if chunk is self._last and chunk.is_gathered:
            return  # most uses follow another one of the same chunk
        self._prepare(chunk)
        if not chunk.is_gathered:
            with _plainly():
                chunk.finish_gather()
        self._look_ahead()

    def use_whole(self, chunk: Bucket) -> Tensor:
        """Return a chunk's whole values, as `use` gathers them; its parameters need not be readable.

        Collective: every rank of the shard group, in the same order.
        """
        if chunk is not self._last or chunk.whole is None:
            self._prepare(chunk)
            self._look_ahead()
        return chunk.arrived()

    def use_all(self) -> None:
        """Use all chunks: one call of Python for each use of a module takes longer than to show all parameters."""
        for chunk in self.layout.buckets:
            self.use(chunk)

    def _prepare(self, chunk: Bucket) -> None:
        """Take note of a use of a chunk, and start to gather it."""
        if self._held and any(chunk in held for held in self._held.values()):
            return  # other ranks may use other parts of what is held
        self._last = chunk
        number = self._number_of[chunk]
        self.timeline.note(number)
        self._ahead.pop(number, None)
        self._used.pop(number, None)
        self._used[number] = chunk  # the last one used is the last one released
        if not chunk.is_gathered:
            with _plainly():
                self.release_unused(keep=1)
                if chunk.state is WholeState.SHARDED:
                    self._start_gather(number, chunk)

    # ---- what buckets tell, see `User`

    def on_use(self, bucket: Bucket, index: int, what: str) -> AbstractContextManager[None] | None:
        """Gather what is used in a forward or a backward.

        Raises:
            ConfigError: If none is running.

        Collective: every rank of the shard group, in the same order.
        """
        if self.use_in_forward is not None:
            return self.use_in_forward(index)
        if not is_in_backward():
            msg = (
                f"Parameter '{self.names[index]}' is kept in shards outside of the model's forward and backward, so "
                f"that `{what}` finds no values. Read values inside of `with model.whole_parameters():` or from "
                "`model.state_dict()` of the boosted model, and change them inside of `with "
                "model.whole_parameters(writes=True):`, each on every rank. `booster.save_model` writes files, "
                "`booster_runtime.ema(booster, model)` keeps an average; copy the model inside of such a block, or "
                "before `boost`."
            )
            raise ConfigError(msg)
        self.use(bucket)
        self.end_with_backward()
        return None

    def end_with_backward(self) -> None:
        """See to it that the backward that is running ends as a phase does, where a script has called it itself."""
        if self.timeline.kind is None and not self._ends_with_backward:
            self._ends_with_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)  # noqa: SLF001 - as DDP does

    def _end_of_backward(self) -> None:
        self._ends_with_backward = False
        self.end()
        self.raise_own_changes()

    def on_show(self, bucket: Bucket) -> None:
        """Remember what the parameters of a bucket are like."""
        self._watch.take(bucket)

    def on_hide(self, bucket: Bucket) -> None:
        """Find those of them that were changed."""
        self._watch.look(bucket)

    def _look_ahead(self) -> None:
        """Start gathering what is expected next."""
        if self.ranks.shard_size == 1:
            return
        for number in self.timeline.upcoming(self._max_prefetch):
            chunk = self.layout.buckets[number]
            if len(self._ahead) >= self._max_prefetch:
                return
            if chunk.state is WholeState.SHARDED:
                # Every rank must decide alike, so this looks at whole chunks, and at no memory of this rank's.
                taken = sum(each.whole_bytes for each in self._ahead.values()) + chunk.whole_bytes
                if self._ahead and self._max_ahead_bytes is not None and taken > self._max_ahead_bytes:
                    return
                self._ahead[number] = chunk
                self._has_looked_ahead = True
                with _plainly():
                    self._start_gather(number, chunk)

    def _start_gather(self, number: int, chunk: Bucket) -> None:
        self._gathered = hash((self._gathered, number))  # the same on every rank, as numbers' hashes are
        chunk.start_gather()

    def hold(self, holder: object, chunks: Sequence[Bucket]) -> None:
        """Gather chunks, and keep them until `let_go`; in between, uses of them are no business of other ranks.

        Args:
            holder: Who wants them; holds nothing yet, or the same.
            chunks: The chunks, in the same order on every rank.

        Collective: every rank of the shard group, in the same order.
        """
        if holder in self._held:
            return
        for chunk in chunks:
            self.use(chunk)
            chunk.pins += 1
        self._held[holder] = list(chunks)

    def let_go(self, holder: object) -> None:
        """Let chunks be released again that somebody holds, if anything."""
        for chunk in self._held.pop(holder, ()):
            chunk.pins = max(chunk.pins - 1, 0)

    def _let_go_of_all(self) -> None:
        for holder in [*self._held]:
            self.let_go(holder)

    def check_same_order(self) -> None:
        """Check that all ranks have gathered the same chunks in the same order since the last call.

        Raises:
            ConfigError: If they have not, so that what they computed with was not what they meant.

        Collective: every rank of the shard group.
        """
        if self.ranks.shard_size == 1:
            return
        own = (self._gathered & _64_BITS).to_bytes(8, "little")
        self._gathered = 0
        # The largest of each byte, and of its difference to 255: a rank that differs from any other sees a larger one.
        device = between_hosts(self._device(), self.ranks.gathering)
        flags = torch.tensor([*own, *(255 - byte for byte in own)], dtype=torch.uint8, device=device)
        told = flags.clone()
        collectives.all_reduce(told, dist.ReduceOp.MAX, self.ranks.gathering).wait()
        if not torch.equal(told, flags):
            self.order.raise_other_order()

    def _device(self) -> torch.device:
        return self.layout.buckets[0].format.device

    def stop_looking_ahead(self) -> bool:
        """Gather nothing ahead of its use from now on, and return whether that makes a difference.

        Collective: none, but every rank must do the same.
        """
        has_looked_ahead, self._has_looked_ahead, self._max_prefetch = self._has_looked_ahead, False, 0
        return has_looked_ahead

    def release_unused(self, keep: int) -> None:
        """Release chunks that nobody pins, the least recently used first, until so many are left."""
        loose = [
            number
            for number, chunk in self._used.items()
            if not chunk.pins and chunk.keep is Keep.IN_USE and chunk.whole is not None
        ]
        for number in loose[: len(loose) - keep]:
            self._used.pop(number).release()
        if self.timeline.kind is None:
            for chunk in self._ahead.values():  # nobody came for them
                chunk.release()
            self._ahead = {}

    def release_all(self) -> None:
        """Release every chunk, pinned or not."""
        for chunk in self.layout.buckets:
            chunk.release()
            chunk.pins = 0
        self._held = {}
        self._used = {}
        self._ahead = {}

    def note_first_use(self, indices: Sequence[int]) -> None:
        """Remember in which order parameters are used first."""
        if self.first_uses is not None:
            self.first_uses.update(dict.fromkeys(indices))

    # ---- changes

    def check_changes(self) -> None:
        """Raise for parameters that somebody has changed by hand on any rank, where such changes are looked for.

        Raises:
            ConfigError: If there are any, or other ranks still use parameters of the phase before.

        Collective: the shard group, in debugging and in the first phases; else none.
        """
        if not self._watch.phases_left:
            self.order.is_on = False
            return
        self.meet()
        self._watch.phases_left -= 1
        self.tell_changes()

    def raise_own_changes(self) -> None:
        """Raise for parameters that were changed by hand on this rank, once ranks do not tell each other any more.

        Raises:
            ConfigError: If there are any.
        """
        error = None if self._watch.phases_left else self.take_changes()
        if error is not None:
            raise error

    def take_changes(self) -> ConfigError | None:
        """Return the error for parameters that were changed by hand on this rank, and forget them."""
        found, self._watch.found = self._watch.found, {}
        return _changed({self.ranks.shard_rank: found})

    def tell_changes(self) -> None:
        """Raise on every rank for parameters that were changed by hand on any.

        Raises:
            ConfigError: If there are any.

        Collective: every rank of the shard group.
        """
        found, self._watch.found = self._watch.found, {}
        error = _changed(dict(enumerate(collectives.all_gather_object(found, self.ranks.gathering))))
        if error is not None:
            raise error

    # ---- what the engine tells, see `Wholes`

    def in_order_of_forward(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Return the chunks as they are: they are laid out in the order of forward."""
        return buckets

    def order_to_lay_out(self, order: list[int], layout: Layout) -> list[int] | None:
        """Return all parameters in the order of their first use so far, unused ones last; see `Wholes`."""
        del order, layout
        first, self.first_uses = self.first_uses, None
        if first is None:  # the order of gathers makes no difference
            return None
        return [*first, *(index for index in self.parameters if index not in first)]

    def wait(self) -> None:
        """Do nothing: no step leaves a gather underway; the next use gathers."""

    def after_laying_out(self) -> None:
        """Take note that the layout has new chunks, whose values are in place."""
        for chunk in self.layout.buckets:
            chunk.round_values()
        self._used = {}
        self._last = None
        self._ahead = {}
        self._pool.clear()
        self._enumerate()
        self.timeline.forget()
        self.is_laid_out_again = True

    def meet(self) -> None:
        """Raise if other ranks still use parameters, where ranks compare what they do.

        Raises:
            ConfigError: If they do.

        Collective: every rank of the shard group, where it compares; else none.
        """
        self.order.meet(self._device())

    def begin_backward(self) -> None:
        """Begin the phase of backward.

        Collective: every rank of the shard group.
        """
        self.memory.moment("backward")
        self.begin(_BACKWARD)

    def end_backward(self) -> None:
        """End it: release what nobody pins."""
        self.end()
        self.raise_own_changes()

    def begin_step(self, buckets: Sequence[Bucket], names: Mapping[int, str]) -> None:
        """Raise for parameters that were changed by hand.

        Raises:
            ConfigError: If there are any.

        Collective: the shard group, in debugging and in the first phases; else none.
        """
        del buckets, names
        self.check_changes()
        self.memory.moment("step")

    def end_step(self, published: Mapping[Bucket, Pending]) -> None:
        """Let the next use of chunks gather what the optimizer made of their slices."""
        for chunk in published:
            if chunk.ranks.shard_size > 1:
                chunk.release()
            chunk.mark_changed()


def _changed(every: Mapping[int, Mapping[str, str]]) -> ConfigError | None:
    """Return the error for parameters that were changed by hand, given by rank how; ``None`` if there are none."""
    told = [
        f"rank {rank}: " + ", ".join(f"'{name}' {how}" for name, how in [*of_rank.items()][:10])
        for rank, of_rank in every.items()
        if of_rank
    ]
    if not told:
        return None
    return ConfigError(
        f"Parameters were changed by hand, where their values are not kept. {'; '.join(told)}. Change values "
        "with `booster.load_model`, or on every rank inside of `with model.whole_parameters(writes=True)`."
    )


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Leave inference mode, whose memory could not be used in training later, and be seen by no mode or transform."""
    private: Any = torch._C  # noqa: SLF001 - as torch's own modes do
    with torch.inference_mode(mode=False), torch.no_grad(), private.DisableTorchFunction(), private._DisableFuncTorch():  # noqa: SLF001
        yield


def is_in_backward() -> bool:
    """Whether autograd is running on this thread, as it is when checkpointed layers are recomputed."""
    return int(torch._C._current_graph_task_id()) != -1  # noqa: SLF001 - no public name
