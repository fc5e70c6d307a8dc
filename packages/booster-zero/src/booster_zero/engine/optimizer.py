"""`ZeroOptimizer`: the user's optimizer over this rank's pieces of parameters, whose updates reach every rank.

A step reads top to bottom in `ZeroOptimizer.step` and `ZeroOptimizer.update_parameters`. Gradients come from the
`Reducer`; how long whole values are kept, and when they are gathered, is a matter of the buckets and of `Wholes`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, OffloadError
from booster_core.gradients import clip_by_norm
from booster_core.plugin import OptimizerWrapper
from booster_core.ranks import DistCoordinator, NamedCall, refuse_capture
from booster_core.state import NamedTensors
from booster_runtime import collectives
from booster_runtime.sharding import (
    BufferWatch,
    HostedOptimizer,
    RaisedAnywhere,
    check_takes_parts,
    raise_for_unused,
    refuse_gradient,
)
from booster_zero.engine.own_methods import call_own_method, is_own_method
from booster_zero.engine.parts import only, steps_in_parts
from booster_zero.engine.reducer import Reducer
from booster_zero.engine.shard import stepping_on

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_runtime.collectives import Pending
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.gathers import Wholes
    from booster_zero.engine.home import Home
    from booster_zero.engine.layout import Layout
    from booster_zero.engine.options import ShardingOptions
    from booster_zero.engine.shard import Format


_AHEAD = 2
"""Buckets whose gradients and values come to the host while one is stepped there."""


class ZeroOptimizer(OptimizerWrapper):
    """Steps the user's optimizer on this rank's part of every parameter, and shares the results.

    Args:
        optim: The user's optimizer; its groups list this rank's pieces from now on.
        model: The user's model.
        config: Options.
        layout: The buckets; parameters that are in none yet are added.
        format_of: Formats and devices of a parameter.
        home: Keeps this rank's part of the buckets.
        gathers: Brings whole values to where they are used.
        offloads: Whether state may be elsewhere than where forward runs. It is stepped on bucket by bucket then, if the
            optimizer allows.
        **kwargs: As for `OptimizerWrapper`.

    Raises:
        ConfigError: If the optimizer, or a parameter, is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    gathers: Any

    def __init__(
        self,
        optim: Optimizer,
        model: nn.Module,
        *,
        config: ShardingOptions,
        layout: Layout,
        format_of: Callable[[nn.Parameter], Format],
        home: Home,
        gathers: Wholes,
        offloads: bool,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        # Asked before the wrapper puts a hook of its own around `step`.
        self._steps_in_parts = offloads and steps_in_parts(optim)
        super().__init__(optim, **kwargs)
        named = NamedTensors.of(model)
        parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._index_of = {key: index for index, key in enumerate(parameters)}
        self.names = {index: named.name_of[key] for index, key in enumerate(parameters)}
        self.config = config
        self.device = device
        self.ranks: ShardingRanks = layout.ranks
        self.layout = layout
        self.home = home
        self._home_keeps_state = home.moves or home.is_on_disk  # and may find no room for it
        self.gathers = gathers
        self._format_of = format_of
        self._used_anywhere: dict[int, bool] = {}
        self._agreed_rounds = 0
        self._changed_buffers: list[bool] = []
        self._buffers = BufferWatch(model)
        self.hosted = HostedOptimizer(optim, self.names)
        self.reducer = Reducer(
            (), self.names, overlap=config.overlap_communication, agree_on_record=self.agree_on_record
        )
        # Whether a group lists them or not: norms count their gradients, and a group may list them later.
        self._trained = {
            index: parameter
            for index, parameter in enumerate(parameters.values())
            if parameter.requires_grad and parameter.is_floating_point()
        }
        self._adopt_groups(optim.param_groups)
        # What is unfrozen later is meant to train.
        held = self.hosted.members()
        self._refused = {
            index: refuse_gradient(parameter, self.names[index])
            for index, parameter in enumerate(parameters.values())
            if not parameter.requires_grad and index not in held
        }

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        own = is_own_method(self.unwrap(), name, found)
        return functools.partial(call_own_method, self, name, found) if own else found

    def _adopt_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over groups that the hosted optimizer lists but does not host yet."""
        members = [[self._index_of[id(parameter)] for parameter in group["params"]] for group in groups]
        by_index = {
            index: parameter
            for indices, group in zip(members, groups, strict=True)
            for index, parameter in zip(indices, group["params"], strict=True)
        }
        for index, parameter in by_index.items():
            if not parameter.is_floating_point():
                msg = (
                    f"Parameter '{self.names[index]}' is of {parameter.dtype}; only floating parameters can be sharded."
                )
                raise ConfigError(msg)
        self.layout.add_missing({**self._trained, **by_index}, self._format_of)
        if self.layout.take_formats(by_index, self._format_of):
            self.rebuild(self.layout.order())
        pieces = self.layout.pieces()
        for indices in members:
            own = {index: pieces[index] for index in indices if index in pieces}
            self.hosted.adopt(len(self.hosted.groups), indices, own)
        self._offload_state(self.layout.buckets)
        self.reducer.set_buckets(self.in_order_of_forward()[::-1])

    def set_model(self, model: nn.Module, norm_dtype: torch.dtype) -> None:
        """Learn of the format of norms; the model's trained parameters are laid out already."""
        del model
        self.norm_dtype = norm_dtype

    def in_order_of_forward(self) -> Sequence[Bucket]:
        """Return the buckets in the order in which forward is expected to use them; they are reduced in reverse."""
        return self.layout.buckets[::-1]

    def listed_parameters(self) -> set[int]:
        listed = self.hosted.members()
        return {key for key, index in self._index_of.items() if index in listed}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the optimizer inside.

        Raises:
            ConfigError: If a parameter is not the model's, or is in a group already, or the optimizer takes this
                group's parameters as wholes while those of the others are cut.

        Collective: none, but every rank must add the same, between a step and the next backward. Under Gemini every
        rank of the shard group, where a parameter that was not trained before gets a master.
        """
        given = param_group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        remedy = "Boost the model with all the parameters that it will have."
        members = self.hosted.new_members(listed, self._index_of, remedy=remedy)
        self.optim.add_param_group({**param_group, "params": listed})
        try:
            self.check_settings(self.optim.param_groups[-1])
        except ConfigError:
            self.optim.param_groups.pop()
            raise
        self._adopt_groups(self.optim.param_groups[-1:])
        for index in members:
            handle = self._refused.pop(index, None)
            if handle is not None:
                handle.remove()
        self._steps_in_parts = self._steps_in_parts and steps_in_parts(self.optim)

    def check_settings(self, group: Mapping[str, Any]) -> None:
        """Check that the optimizer inside can step on parts of the parameters of a group, as they are laid out.

        Raises:
            ConfigError: If it can't.
        """
        if self.layout.kind == "flat":
            check_takes_parts(self.unwrap(), self.config.partition, group)

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Lay the buckets out by what the first round has shown.

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
        every = collectives.all_gather_object((late, unused), self.ranks.holders)
        self.reducer.unused_somewhere = {index for _, of_rank in every for index in of_rank}
        self.lay_out_again(order)
        return {index for of_rank, _ in every for index in of_rank}

    def lay_out_again(self, order: list[int]) -> None:
        """Lay the buckets out in the order in which the first rank's backward produced gradients.

        Args:
            order: The parameters, in that order on this rank.

        Collective: every rank that holds the same parameters.
        """
        first = collectives.all_gather_object(order, self.ranks.holders)[0]
        every = self.layout.order()
        new = self.layout.order_with_copies_last(first)
        # To a rank that shares nothing it is all the same when a bucket is complete.
        ranks = [self.ranks, *(bucket.ranks for bucket in self.layout.buckets)]
        is_shared = any(each.shard_size > 1 or each.replica_group is not None for each in ranks)
        if new != every and is_shared:
            self.rebuild(new)

    def rebuild(self, order: Sequence[int]) -> None:
        """Move values, gradients and state to where they are when parameters are laid out in another order.

        Collective: every rank of the shard group.
        """
        states = self.layout.rebuild(order, self.hosted.states())
        self.hosted.replace(self.layout.pieces(), states)
        self.layout.note_used(self._used_anywhere)
        self.reducer.set_buckets(self.in_order_of_forward()[::-1])

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss and reduce its gradients; see `OptimizerWrapper.backward`.

        Collective: every rank of the world; under stage 1's ``no_sync`` none.
        """
        refuse_capture("backward")
        self.gathers.begin_backward()
        try:
            with NamedCall("reduction of gradients"), self.reducer.guarded():
                super().backward(loss, inputs, retain_graph=retain_graph)
        finally:
            self.gathers.end_backward()

    def settle(self) -> None:
        """Bring all gradients into the shards, and agree on which parameters were used.

        Collective: every rank of the world.
        """
        self.reducer.settle()
        self._leave_out_dropped()
        if self.reducer.num_rounds == self._agreed_rounds:
            return
        self._agreed_rounds = self.reducer.num_rounds
        indices, used = self.layout.order(), self.reducer.used
        flags = bytearray(index in used for index in indices)
        if self.config.unused == "raise":
            unused = sorted(index for index, is_used in zip(indices, flags, strict=True) if not is_used)
            members = self.hosted.members()  # others may stay as they are
            unused = [index for index in unused if index in members and self.layout.parameters[index].requires_grad]
            raise_for_unused([self.names[index] for index in unused])
        flags.extend(self._buffers.changed() if self.config.broadcast_buffers else ())
        flagged = RaisedAnywhere(flags, self.device, self.ranks.holders)
        self.layout.average_over_replicas()
        anywhere = flagged.wait()
        found = {index: bool(is_used) for index, is_used in zip(indices, anywhere, strict=False)}
        self.reducer.unused_anywhere = {index for index, is_used in found.items() if not is_used}
        self._used_anywhere = self.join_copies(found)
        self.reducer.show_used({index for index, is_used in self._used_anywhere.items() if is_used})
        self._changed_buffers = [bool(has_changed) for has_changed in anywhere[len(indices) :]]
        self.layout.note_used(self._used_anywhere)

    def _leave_out_dropped(self) -> None:
        """Leave parameters as they are whose gradient a script has dropped."""
        dropped, self.reducer.dropped = self.reducer.dropped, set()
        if dropped:
            self._used_anywhere.update(dict.fromkeys(dropped, False))
            self.layout.note_used(self._used_anywhere)

    def join_copies(self, used: dict[int, bool]) -> dict[int, bool]:
        """Add up what other ranks than the holders have of the gradients, and return which parameters were used.

        There are none, unless a strategy keeps copies of a parameter on several stages of one model.

        Args:
            used: By parameter, whether any of its holders used it.

        Collective: every rank of the strategy's mesh.
        """
        return used

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's pieces, averaged over ranks.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self.settle()
        return [gradient for bucket in self.layout.buckets for gradient in bucket.used_gradients()]

    def gradient_layout(self) -> Any:
        """Return of which parameters this rank has gradients, and in which order they are laid out."""
        self.settle()
        return [self.names[index] for index in self.layout.order() if self._used_anywhere.get(index)]

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all shards of a replica, each element counted once."""
        group = self.ranks.shard_group or dist.group.WORLD
        return clip_by_norm(
            self.gradients(),
            max_norm,
            norm_type,
            groups=[] if group is None else [group],
            device=self.device,
            dtype=self.norm_dtype,
            error_if_nonfinite=error_if_nonfinite,
        )

    def overflow_anywhere(self, overflow: bool) -> bool:  # noqa: FBT001 - as in core
        """Return whether a gradient overflowed on any rank.

        Collective: every rank of the world.
        """
        return any(RaisedAnywhere(bytearray([overflow]), self.device).wait())

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the gradients of a parameter are reduced here: it is trained, or in one of the groups."""
        return self._index_of.get(id(parameter)) in self.layout.parameters

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of a parameter's whole gradient, without loss scale; ``None`` where no rank used it.

        Collective: every rank of the world.
        """
        index = self._index_of[id(parameter)]
        self.settle()
        if not self._used_anywhere.get(index):
            return None
        whole = self.layout.whole_gradient(index, parameter.numel())
        if self.loss_scaler is not None and not self.is_unscaled:
            whole /= self.loss_scaler.scale
        return whole.view(parameter.shape)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, reduced or not."""
        if set_to_none:
            self.reducer.clear()
            self._used_anywhere = {}
        else:
            self.reducer.zero()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's pieces, and bring every rank's into all parameters; see `OptimizerWrapper.step`.

        Collective: every rank of the world.
        """
        if closure is None:
            self._clip_as_configured()
        return super().step(closure)  # which unscales, and calls `update_parameters` unless a gradient overflowed

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside on this rank's pieces, then share them.

        Raises:
            ConfigError: If a parameter was given other memory since it was laid out.
            GradientError: If a script has assigned ``parameter.grad``.
            OffloadError: On every rank, if state could not be read or written on one.

        Collective: every rank of the world.
        """
        self.gathers.begin_step(self.layout.buckets, self.names)
        published: dict[Bucket, Pending] = {}
        result, error = None, None
        if closure is not None:
            result = self._step_with(closure)
        else:
            self.settle()
            self.reducer.check_assigned()
            try:
                result = self._step_pieces(published)
            except OffloadError as caught:
                if not self.home.moves:
                    raise
                error = caught
            if self.home.moves:
                self.raise_together(error)
        self._buffers.send_changed(self._changed_buffers, self.ranks.holders)
        self._changed_buffers = []
        for bucket in self.in_order_of_forward():
            if self.is_used(bucket) and bucket not in published:
                with bucket.in_use(changes=True) if bucket.home.moves else contextlib.nullcontext():
                    published[bucket] = bucket.publish()
        self.gathers.end_step(published)
        self.end_step()
        return result

    def _step_pieces(self, published: dict[Bucket, Pending]) -> Any:
        """Step on all pieces at once; offloaded ones bucket by bucket, each on its way while the next one is stepped.

        Collective: the shard group.
        """
        buckets = [bucket for bucket in self.in_order_of_forward() if self.is_used(bucket)]
        result = None
        if not self._steps_in_parts:
            with stepping_on(buckets):
                result = self.optim.step()
                self._offload_state(buckets)
            return result
        groups = [list(group["params"]) for group in self.param_groups]
        has_stepped = False
        with contextlib.ExitStack() as started:
            for position, bucket in enumerate(buckets, start=1):
                for following in buckets[position : position + _AHEAD]:
                    following.start_descent()
                    started.callback(following.end_descent)
                with bucket.stepping():
                    own = {id(piece.values) for piece in bucket.pieces if piece.values.grad is not None}
                    if own:
                        has_stepped = True
                        self._bring_counters(own)
                        with only(self.optim, [[values for values in group if id(values) in own] for group in groups]):
                            result = self.optim.step()
                        self._offload_state([bucket])
                    published[bucket] = bucket.publish()
        if not has_stepped:  # schedulers count steps, also where this rank has nothing to update
            with only(self.optim, [[] for _ in groups]):
                result = self.optim.step()
        return result

    def _bring_counters(self, pieces: Container[int]) -> None:
        """Move the counters of steps to where pieces are stepped on, for optimizers that take them from there.

        Others keep them on the host, so that reading them does not stop the device.

        Args:
            pieces: The ids of the pieces' values.
        """
        for group in self.param_groups:
            if group.get("fused") or group.get("capturable"):
                for values in group["params"]:
                    state = self.optim.state.get(values, {}) if id(values) in pieces else {}
                    if isinstance(step := state.get("step"), torch.Tensor) and step.device != values.device:
                        state["step"] = step.to(values.device)

    def _step_with(self, closure: Callable[[], float]) -> Any:
        """Let the optimizer inside evaluate the model as often as it asks for."""
        with contextlib.ExitStack() as stack:

            def evaluated() -> float:
                stack.close()
                loss = closure()
                self.settle()
                self.reducer.check_assigned()
                self._clip_as_configured()
                for bucket in self.layout.buckets:
                    if self.is_used(bucket):
                        stack.enter_context(bucket.stepping())
                return loss

            result = self.optim.step(evaluated)
            self._offload_state(self.layout.buckets)
        return result

    def _offload_state(self, buckets: Sequence[Bucket]) -> None:
        """Move state that the optimizer inside has made to where the buckets' home keeps it."""
        if self._home_keeps_state:
            states = self.hosted.states()
            for bucket in buckets:
                bucket.offload_state(states)

    def _clip_as_configured(self) -> None:
        if self.config.max_norm > 0 and self.scaling.norm is None:
            self.clip_grad_by_norm(self.config.max_norm)

    def end_step(self) -> None:
        """Raise on every rank what went wrong on any apart from the step itself, which is complete.

        Collective: every rank of the world, where state may be on a disk; else none.
        """
        if self._home_keeps_state:
            told = "The step was taken, and nothing is lost: what found no room stays in RAM and can be saved."
            self.raise_together(self.home.problem(told))

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank an error that any has, where tensors are offloaded to a disk or moved.

        Collective: every rank of the world, where they are; else none.
        """
        if self.is_anywhere(error):
            with DistCoordinator().together("offload to disk"):
                if error is not None:
                    raise error

    def is_anywhere(self, error: Exception | None) -> bool:
        """Return whether any rank has an error, where tensors are offloaded to a disk or moved; else ``False``.

        Collective: every rank of the world, where they are; else none.
        """
        if not self._home_keeps_state:
            return False
        return self.overflow_anywhere(error is not None)

    def publish(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Bring what this rank's optimizer holds of some buckets, or all, into every rank's parameters.

        Collective: the shard group.
        """
        self.gathers.wait()
        chosen = self.layout.buckets if buckets is None else buckets
        for bucket, pending in [(bucket, bucket.publish()) for bucket in chosen]:
            pending.wait()
            bucket.mark_changed()

    def is_used(self, bucket: Bucket) -> bool:
        """Whether any of a bucket's parameters took part in backward on any rank."""
        return any(self._used_anywhere.get(slot.index) for slot in bucket.plan.slots)
