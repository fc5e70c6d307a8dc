"""`ZeroOptimizer`: a sharded optimizer whose updates are gathered into every rank's parameters after each step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from booster_runtime import collectives
from booster_runtime.sharding import partition_for
from booster_zero.bucket import Bucket
from booster_zero.engine.layout import Layout
from booster_zero.engine.optimizer import ShardedOptimizer
from booster_zero.engine.parts import only, steps_in_parts
from booster_zero.gathers import Gathers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_runtime.collectives import Pending
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.config import ZeroConfig
    from booster_zero.engine.bucket import Format
    from booster_zero.room import Room


class ZeroOptimizer(ShardedOptimizer):
    """Steps the user's optimizer on this rank's part of every parameter, and shares the results.

    Args:
        optim: The user's optimizer; its groups list this rank's pieces from now on.
        model: The user's model.
        config: Options.
        ranks: The ranks that share the state.
        format_of: Formats and places of a parameter.
        room: Where what the optimizer updates and keeps is to lie.
        **kwargs: As for `OptimizerWrapper`.

    Raises:
        ConfigError: If the optimizer, or a parameter, is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    layout: Layout[Bucket]

    def __init__(
        self,
        optim: Optimizer,
        model: nn.Module,
        *,
        config: ZeroConfig,
        ranks: ShardingRanks,
        format_of: Callable[[nn.Parameter], Format],
        room: Room,
        **kwargs: Any,
    ) -> None:
        self._format_of = format_of
        self._steps_in_parts = config.offloads and steps_in_parts(optim)
        self.room = room
        self.gathers = Gathers()
        self._overlaps_gathers = config.overlap_allgather
        self._published: dict[Bucket, Pending] = {}
        held = [parameter for group in optim.param_groups for parameter in group["params"]]
        gradient_bytes = sum(parameter.numel() * format_of(parameter).wire.itemsize for parameter in held)
        super().__init__(
            optim,
            model,
            layout=Layout(
                ranks,
                functools.partial(Bucket, room=room),
                kind=partition_for(optim, config.partition),
                bucket_bytes=config.bucket_bytes_for(gradient_bytes),
            ),
            ranks=ranks,
            max_norm=config.max_norm,
            overlap=config.overlap_communication,
            unused=config.unused,
            partition=config.partition,
            broadcast_buffers=config.broadcast_buffers,
            **kwargs,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the optimizer inside; see `ShardedOptimizer.add_param_group`.

        Collective: none, but every rank must add the same, between a step and the next backward.
        """
        super().add_param_group(param_group)
        self._steps_in_parts = self._steps_in_parts and steps_in_parts(self.optim)

    def lay_out(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Put parameters into buckets, in the order in which their gradients are expected.

        Collective: none; every rank adds the same.
        """
        # Until the first backward has shown better, that is the reverse order of registration.
        expected = {index: parameters[index] for index in sorted(parameters, reverse=True)}
        formats = {index: self._format_of(parameter) for index, parameter in expected.items()}
        # What is held elsewhere too must be laid out as it is there, where other parameters stand beside it.
        for copies in sorted({format_.copies for format_ in formats.values()}):
            alike = {index: parameter for index, parameter in expected.items() if formats[index].copies == copies}
            self.layout.add(alike, {index: formats[index] for index in alike})

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Lay the buckets out in the order in which the first rank's backward produced gradients.

        Collective: every rank that holds the same parameters.
        """
        first = dict.fromkeys(collectives.all_gather_object(order, self.ranks.holders)[0])
        repeated = super().agree_on_record(order, late)
        every = [slot.index for bucket in self.layout.buckets for slot in bucket.plan.slots]
        # What has copies elsewhere comes last, and in an order that all places know.
        apart = {index for index in every if self.layout.format_of(index).copies}
        first = dict.fromkeys(index for index in first if index not in apart)
        rest = [index for index in every if index not in first and index not in apart]
        new = [*first, *rest, *sorted(apart, reverse=True)]
        if new != every and self._has_company():
            self.lay_out_anew(new)
        return repeated

    def _has_company(self) -> bool:
        """Whether other ranks hold the same parameters. To one alone it is all the same when a bucket is complete."""
        return self.ranks.shard_size > 1 or self.ranks.replica_group is not None

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss and reduce its gradients; see `OptimizerWrapper.backward`.

        Collective: every rank of the world; under stage 1's ``no_sync`` none.
        """
        self.gathers.wait()
        super().backward(loss, inputs, retain_graph=retain_graph)

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside on this rank's pieces, then share them.

        Raises:
            ConfigError: If a parameter was given other memory since it was laid out.

        Collective: every rank of the world.
        """
        self.gathers.wait()
        for bucket in self.layout.buckets:
            bucket.notice_changes(self.names)
        self._published = {}
        result = self.update_pieces(closure)
        published = {
            bucket: self._published[bucket] if bucket in self._published else bucket.publish()
            for bucket in self._in_order_of_forward()
            if self.is_used(bucket)
        }
        self._published = {}
        if self._overlaps_gathers:
            _count_as_changed(published)
            for bucket, pending in published.items():
                self.gathers.start(bucket, pending)
        else:
            self._end_publishing(published)
        self.room.check_together(
            "The step was taken, and nothing is lost: what found no room stays in RAM and can be saved."
        )
        return result

    def step_pieces(self) -> Any:
        """Step on all pieces at once; offloaded ones bucket by bucket, each on its way while the next one is stepped.

        Collective: the shard group.
        """
        if not self._steps_in_parts:
            return super().step_pieces()
        result = None
        groups = [list(group["params"]) for group in self.param_groups]
        for bucket in self._in_order_of_forward():
            own = {id(piece.values) for piece in bucket.pieces if piece.values.grad is not None}
            if own:
                with only(self.optim, [[values for values in group if id(values) in own] for group in groups]):
                    result = self.optim.step()
                bucket.house(self.hosted.states())
            if self.is_used(bucket):
                self._published[bucket] = bucket.publish()
        return result

    def publish(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Bring what this rank's optimizer holds of some buckets, or all, into every rank's parameters.

        Collective: the shard group.
        """
        self.gathers.wait()
        self._end_publishing(
            {bucket: bucket.publish() for bucket in (self.layout.buckets if buckets is None else buckets)}
        )

    def _end_publishing(self, pending: Mapping[Bucket, Pending]) -> None:
        for each in pending.values():
            each.wait()
        _count_as_changed(pending)

    def _in_order_of_forward(self) -> list[Bucket]:
        """Return the buckets in the order in which the next forward is expected to use them."""
        return list(reversed(self.layout.buckets))


def _count_as_changed(buckets: Iterable[Bucket]) -> None:
    """Refuse to run a graph backward that was built before the update, as everywhere in torch."""
    for bucket in buckets:
        torch.autograd.graph.increment_version(bucket.parameters)
        bucket.note_versions()
