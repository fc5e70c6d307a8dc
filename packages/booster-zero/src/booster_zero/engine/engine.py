"""`ShardedEngine`: the sharded parameters of one model, their gradients, and the optimizers that step on them.

Gradients come from the `Reducer`; how long whole values are kept, and when they are gathered, is a matter of the
buckets and of the `Gatherer`. Reduction and norms go by model, steps by optimizer: each has buckets of its own.
"""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass

from booster_core.errors import ConfigError
from booster_runtime import collectives
from booster_runtime.sharding import (
    AnyRankFlags,
    BufferWatch,
    HostedOptimizer,
    numbers_of_group,
    raise_for_unused,
    raised_on_all,
    refuse_gradient,
)
from booster_zero.engine.optimizer import ShardedOptimizer
from booster_zero.engine.reducer import Reducer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, GradientScaling
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.gatherer import Gatherer
    from booster_zero.engine.layout import Layout, ListedParameters
    from booster_zero.engine.memory import Memory
    from booster_zero.engine.options import ShardingOptions
    from booster_zero.engine.partition import Format


class _Told(NamedTuple):
    """What a rank has told the others: flags of the parameters used, of settings, of gathers, and of buffers."""

    flags: AnyRankFlags
    indices: list[int]
    num_note: int
    num_uses: int


class ShardedEngine:
    """Keeps the parameters of a model in buckets, and reduces their gradients.

    Args:
        model: The user's model.
        optimizers: The user's optimizers, which step on this rank's pieces from now on.
        config: Options.
        listed: The parameters that the optimizers list.
        gatherer: Has the buckets; parameters that are in none yet are added.
        format_of: Formats and devices of a parameter.
        device: Where forward runs.

    Attributes:
        gatherer: As given.
        layout: Its buckets.
        memory: What keeps this rank's part of them.
        hosted: The optimizers.
        names: Names of the model's parameters by number.
        index_of: Numbers of the parameters by ``id``.
        reducer: Brings gradients into the buckets.
        used_anywhere: By parameter, whether any rank used it since its gradient was dropped.
        scaling: What the boosted optimizers share, which set it, like the context.
        context: Of the ``boost``.
        changed_buffers: For each buffer, whether forward has changed it on any rank since the last step.

    Raises:
        ConfigError: If a parameter is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    scaling: GradientScaling
    context: BoostContext

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        config: ShardingOptions,
        listed: ListedParameters,
        gatherer: Gatherer,
        format_of: Callable[[nn.Parameter], Format],
        device: torch.device,
    ) -> None:
        self.gatherer = gatherer
        self.layout: Layout = gatherer.layout
        self.memory: Memory = gatherer.memory
        self.ranks: ShardingRanks = gatherer.ranks
        self.names, self.index_of = self.layout.names, self.layout.index_of
        self.config = config
        self.device = device
        self._format_of = format_of
        self._listed = listed
        self.used_anywhere: dict[int, bool] = {}
        self._agreed_rounds = 0
        self.changed_buffers: list[bool] = []
        self._told: _Told | None = None
        self._buffers = BufferWatch(model)
        self._stepped: set[int] = set()
        self.hosted = [HostedOptimizer(each, self.names) for each in optimizers]
        own = weakref.WeakMethod(self.agree_on_record)  # a reducer that kept its engine would keep all shards

        def agree_on_record(order: list[int], late: set[int]) -> set[int]:
            method = own()
            assert method is not None, "backward ends as long as the engine lives"
            return method(order, late)

        self.reducer = Reducer((), self.names, overlap=config.overlap_communication, agree_on_record=agree_on_record)
        # Whether a group lists them or not: norms count their gradients, and a group may list them later.
        self._trained = {
            index: parameter
            for index, parameter in self.layout.every.items()
            if parameter.requires_grad and parameter.is_floating_point()
        }
        self._adopt([(hosted, group) for hosted in self.hosted for group in hosted.optimizer.param_groups])
        # What is unfrozen later is meant to train.
        members = self.members()
        self._refused = {
            index: refuse_gradient(parameter, self.names[index])
            for index, parameter in self.layout.every.items()
            if not parameter.requires_grad and index not in members
        }

    # ---- optimizers

    @property
    def compares_settings(self) -> bool:
        """Whether all ranks send flags together in each step, and settings of groups with them."""
        return self.ranks.holders is None or self.ranks.holders.size() == dist.get_world_size()

    @property
    def has_replicas(self) -> bool:
        """Whether there are several ranks, each of which has all of ``layout.alike`` at any time."""
        return self.compares_settings and not self.gatherer.gathers_on_use and self.context.coordinator.world_size > 1

    def members(self) -> set[int]:
        """Return the numbers of all parameters that an optimizer lists."""
        return set().union(*(hosted.members() for hosted in self.hosted))

    def partition_of(self, number: int) -> str:
        """Return how the optimizer with a number takes parameters: ``"flat"`` or ``"parameter"``."""
        return self._listed.partitions[number]

    def new_members(self, given: Any) -> list[int]:
        """Return the numbers of the parameters of a group that is to be added.

        Args:
            given: The group's ``"params"``.

        Raises:
            ConfigError: If a parameter is not the model's, or is in a group already.
        """
        remedy = "Boost the model with all the parameters that it will have."
        return numbers_of_group(given, self.index_of, self.members(), self.names, remedy=remedy)

    def add_group(self, number: int, members: Sequence[int]) -> None:
        """Take over the last group of an optimizer, which lists parameters of the model still.

        Args:
            number: Of the optimizer.
            members: The numbers of the parameters.

        Collective: every rank of the shard group, where parameters are in buckets already; else none.
        """
        hosted = self.hosted[number]
        group = hosted.optimizer.param_groups[-1]
        self._listed.add(group["params"], number)
        self._adopt([(hosted, group)])
        for index in members:
            handle = self._refused.pop(index, None)
            if handle is not None:
                handle.remove()

    def _adopt(self, added: Sequence[tuple[HostedOptimizer, Mapping[str, Any]]]) -> None:
        """Take over groups that hosted optimizers list but do not host yet."""
        by_index = {self.index_of[id(parameter)]: parameter for _, group in added for parameter in group["params"]}
        for index, parameter in by_index.items():
            if not parameter.is_floating_point():
                msg = (
                    f"Parameter '{self.names[index]}' is of {parameter.dtype}; only floating parameters can be "
                    "sharded. Keep the `torch.view_as_real` of a complex one, or use plugin='ddp'."
                )
                raise ConfigError(msg)
        self.layout.add_missing({**self._trained, **by_index}, self._format_of)
        self._regroup(by_index)
        pieces = self.layout.pieces()
        for hosted, group in added:
            indices = [self.index_of[id(parameter)] for parameter in group["params"]]
            own = {index: pieces[index] for index in indices if index in pieces}
            hosted.adopt(len(hosted.groups), indices, own)
        self.keep_state(self.layout.buckets)
        self.reducer.set_buckets(self.in_order_of_forward()[::-1])

    def keep_state(self, buckets: Sequence[Bucket]) -> None:
        """Move state that optimizers have made to where the buckets' memory keeps it."""
        if self.memory.moves:
            states = [hosted.states() for hosted in self.hosted]
            for bucket in buckets:
                bucket.keep_state(states[bucket.format.optimizer])

    # ---- layout

    def in_order_of_forward(self, number: int | None = None) -> Sequence[Bucket]:
        """Return buckets in the order in which forward is expected to use them; they are reduced in reverse.

        Args:
            number: Of the optimizer that steps on them; ``None`` for all buckets.
        """
        buckets: Sequence[Bucket] = self.gatherer.in_order_of_forward(self.layout.buckets)
        return buckets if number is None else [each for each in buckets if each.format.optimizer == number]

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Reduce buckets in the order in which the first round has completed them.

        Args:
            order: The parameters, in the order in which this rank's backward produced gradients.
            late: Those whose gradients came again after their bucket had left.

        Returns:
            Those whose gradients came again too late on any rank.

        Collective: every rank that holds the same parameters.
        """
        came = set(order)
        parameters = self.layout.parameters.items()
        unused = {index for index, parameter in parameters if parameter.requires_grad and index not in came}
        every = collectives.all_gather_object((order, late, unused), self.ranks.holders)
        self.reducer.unused_somewhere = {index for *_, of_rank in every for index in of_rank}
        place = {index: position for position, index in enumerate(every[0][0])}
        buckets = sorted(
            self.layout.buckets, key=lambda bucket: max(place.get(slot.index, -1) for slot in bucket.plan.slots)
        )
        if not self.gatherer.gathers_on_use:
            self.layout.buckets = buckets
        self.reducer.set_buckets(buckets)
        return {index for _, of_rank, _ in every for index in of_rank}

    def _regroup(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Give parameters that optimizers list only now buckets of their own; see `Layout.regroup`."""
        added = {index: each for index, each in parameters.items() if not self.layout.is_listed(index)}
        if added:
            with self.gatherer.exchanging():
                self.layout.regroup(added, self._format_of)
            self.layout.note_used(self.used_anywhere)

    # ---- gradients

    def settle(self) -> None:
        """Bring all gradients into the shards, and agree on which parameters were used.

        Raises:
            ConfigError: As `hear`, about a backward that no step came after. A step hears before it changes anything.

        Collective: every rank of the world.
        """
        self.reducer.settle()
        self._leave_out_dropped()
        if self.reducer.num_rounds != self._agreed_rounds:
            self._agreed_rounds = self.reducer.num_rounds
            self._agree_on_used()

    def _agree_on_used(self) -> None:
        self.hear()
        indices, used = self.layout.order(), self.reducer.used
        used_here = [index in used for index in indices]
        if self.config.unused == "raise":
            unused = sorted(index for index, is_used in zip(indices, used_here, strict=True) if not is_used)
            members = self.members()  # others may stay as they are
            unused = [index for index in unused if index in members and self.layout.parameters[index].requires_grad]
            raise_for_unused([self.names[index] for index in unused])
        with DisableTorchFunctionSubclass():
            trained = bytes([self.layout.parameters[index].requires_grad for index in indices])
        note = b""
        if self.has_replicas:
            self.scaling.settings.find_written(self.layout.alike)
        if self.compares_settings:
            note = self.scaling.settings.note(self.scaling.groups, trained)
        uses = self.gatherer.flags()
        buffers = self._buffers.changed() if self.config.broadcast_buffers else ()
        flags = bytearray([*used_here, *note, *uses, *buffers])
        flagged = AnyRankFlags(flags, self.device, self.ranks.holders)
        self.layout.average_over_replicas()
        self._told = _Told(flagged, indices, len(note), len(uses))
        # What all of this rank's backward has used is used. Else the answer takes as long as the slowest rank. Errors
        # are left to `hear`: ranks of which some wait here, and some do not, have not come to one place.
        answer: Sequence[int] = used_here if all(used_here) else flagged.wait()
        found = {index: bool(is_used) for index, is_used in zip(indices, answer, strict=False)}
        self.reducer.unused_anywhere = {index for index, is_used in found.items() if not is_used}
        self.used_anywhere = self.join_tied_uses(found)
        self.reducer.show_used({index for index, is_used in self.used_anywhere.items() if is_used})
        self.layout.note_used(self.used_anywhere)

    def hear(self) -> None:
        """Wait for what ranks have told each other in `settle`, if anything that was not heard.

        Raises:
            ConfigError: If ranks differ in what they must have alike.

        Collective: every rank of the world, if ranks differ; else none.
        """
        if self._told is None:
            return
        told, self._told = self._told, None
        anywhere, indices = told.flags.wait(), told.indices
        of_settings, of_uses = len(indices) + told.num_note, len(indices) + told.num_note + told.num_uses
        changed = [bool(has_changed) for has_changed in anywhere[of_uses:]]
        # A step that was left out for an overflow has sent none.
        self.changed_buffers = [*map(operator.or_, changed, self.changed_buffers)] if self.changed_buffers else changed
        if told.num_note:
            names = (self.names[index] for index in indices)
            self.scaling.settings.check(anywhere[len(indices) : of_settings], names, self.context)
        self.gatherer.check_uses(anywhere[of_settings:of_uses])

    def _leave_out_dropped(self) -> None:
        """Leave parameters as they are whose gradient a script has dropped."""
        dropped, self.reducer.dropped = self.reducer.dropped, set()
        if dropped:
            self.used_anywhere.update(dict.fromkeys(dropped, False))
            self.layout.note_used(self.used_anywhere)

    def join_tied_uses(self, used: dict[int, bool]) -> dict[int, bool]:
        """Add up what other ranks than the holders have of the gradients, and return which parameters were used.

        There are none, unless a strategy keeps copies of a parameter on several stages of one model.

        Args:
            used: By parameter, whether any of its holders used it.

        Collective: every rank of the strategy's mesh.
        """
        return used

    def is_used(self, bucket: Bucket) -> bool:
        """Whether any of a bucket's parameters took part in backward on any rank."""
        for slot in bucket.plan.slots:  # noqa: SIM110 - a generator would be a call for each bucket, and one more
            if self.used_anywhere.get(slot.index):
                return True
        return False

    def drop_gradients(self, number: int) -> None:
        """Drop the gradients of what the optimizer with a number steps on."""
        buckets = self.in_order_of_forward(number)
        if len(buckets) == len(self.layout.buckets):
            self.reducer.clear()
            self.used_anywhere = {}
            return
        self.reducer.clear(buckets)
        for bucket in buckets:
            for slot in bucket.plan.slots:
                self.used_anywhere.pop(slot.index, None)

    # ---- steps

    def send_buffers(self) -> None:
        """Give every rank the first rank's values of buffers that forward has changed since the last call.

        Collective: every rank that holds the same parameters.
        """
        self._buffers.send_changed(self.changed_buffers, self.ranks.holders)
        self.changed_buffers = []

    def note_step(self, number: int) -> None:
        """Note that the step of an optimizer is complete, and call `end_step` when all have stepped.

        Collective: as `end_step`.
        """
        self._stepped.add(number)
        if len(self._stepped) == len(self.hosted):
            self._stepped.clear()
            self.end_step()

    def end_step(self) -> None:
        """Raise on every rank what went wrong on any apart from the step itself, which is complete.

        Collective: every rank of the world, where blocks move; else none.
        """
        self.raise_together(self.memory.problem())

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank an error that any has, where blocks move.

        Collective: every rank of the world, where they are; else none.
        """
        if self.memory.moves:
            with raised_on_all("offload to disk", self.device):
                if error is not None:
                    raise error


def engine_of(optimizers: Sequence[Optimizer]) -> ShardedEngine | None:
    """Return the engine that a model's boosted optimizers share; ``None`` where nothing is trained."""
    return next((each.engine for each in optimizers if isinstance(each, ShardedOptimizer)), None)
