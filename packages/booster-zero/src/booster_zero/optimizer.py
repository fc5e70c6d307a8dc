"""`ZeroOptimizer`: the user's optimizer over this rank's shards, made ready by reductions and followed by a gather."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core import collectives
from booster_core.errors import ConfigError, GradientError
from booster_core.gradients.clip import clip_by_norm
from booster_core.liveness import naming_missing_ranks
from booster_core.sharding.agreement import send_first
from booster_core.sharding.elementwise import partition_for
from booster_core.sharding.hosting import HostedOptimizer
from booster_core.sharding.parts import only, steps_in_parts
from booster_core.state.naming import NamedTensors
from booster_core.wrappers import OptimizerWrapper
from booster_zero.buffers import BufferWatch
from booster_zero.layout import Layout
from booster_zero.reducer import Reducer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.collectives import Pending
    from booster_core.sharding.ranks import ShardingRanks
    from booster_zero.bucket import Bucket, Format
    from booster_zero.config import ZeroConfig
    from booster_zero.room import Room


class ZeroOptimizer(OptimizerWrapper):
    """Steps the user's optimizer on this rank's part of every parameter.

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
        super().__init__(optim, **kwargs)
        named = NamedTensors.of(model)
        parameters = {id(parameter): parameter for parameter in model.parameters()}
        self.names: dict[int, str] = {}
        self._index_of: dict[int, int] = {}
        for index, key in enumerate(parameters):
            self._index_of[key] = index
            self.names[index] = named.name_of[key]
        self._model = model
        self._config = config
        self.ranks = ranks
        self._format_of = format_of
        self._agreed: dict[int, bool] = {}
        self._agreed_rounds = 0
        self._changed_buffers: list[bool] = []
        self._buffers = BufferWatch(model)
        kind = partition_for(optim, config.partition)
        self._steps_in_parts = config.offloads and steps_in_parts(optim)
        self.room = room
        self.layout = Layout(ranks, kind=kind, bucket_bytes=config.bucket_bytes, room=room)
        self.hosted = HostedOptimizer(optim, self.names)
        self.reducer = Reducer(
            (), self.names, overlap=config.overlap_communication, agree_on_record=self._agree_on_record
        )
        self._adopt_groups(optim.param_groups)

    # ---- parameters and groups

    def _adopt_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Lay out the parameters of groups that the hosted optimizer lists but does not host yet."""
        members = [[self._index_of[id(parameter)] for parameter in group["params"]] for group in groups]
        by_index = {
            index: parameter
            for indices, group in zip(members, groups, strict=True)
            for index, parameter in zip(indices, group["params"], strict=True)
        }
        self._check_parameters(by_index)
        # Until the first backward has shown better, gradients are expected in the reverse order of registration.
        expected = {index: by_index[index] for index in sorted(by_index, reverse=True)}
        self.layout.add(expected, {index: self._format_of(parameter) for index, parameter in expected.items()})
        pieces = self.layout.pieces()
        for indices in members:
            own = {index: pieces[index] for index in indices if index in pieces}
            self.hosted.adopt(len(self.hosted.groups), indices, own)
        for bucket in self.layout.buckets:
            bucket.house(self.hosted.states())
        self.reducer.set_buckets(self.layout.buckets)

    def _check_parameters(self, parameters: Mapping[int, nn.Parameter]) -> None:
        addresses: dict[object, int] = {}
        for index, parameter in parameters.items():
            name = self.names[index]
            if not parameter.is_floating_point():
                msg = f"Parameter '{name}' is of {parameter.dtype}; only floating parameters can be sharded."
                raise ConfigError(msg)
            if not parameter.numel():
                continue
            storage = parameter.untyped_storage().data_ptr() + parameter.storage_offset() * parameter.element_size()
            other = addresses.setdefault((storage, parameter.device), index)
            if other != index:
                msg = (
                    f"Parameters '{self.names[other]}' and '{name}' are two objects over the same memory. Tie them by "
                    "assigning one Parameter to both modules."
                )
                raise ConfigError(msg)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the optimizer inside.

        Raises:
            ConfigError: If a parameter is not the model's, or is in a group already.

        Collective: none, but every rank must add the same, between a step and the next backward.
        """
        given = param_group["params"]
        listed = (
            [given]
            if isinstance(given, torch.Tensor)
            else [item[1] if isinstance(item, tuple) else item for item in given]
        )
        taken = {index for members in self.hosted.groups for index in members}
        for position, parameter in enumerate(listed):
            index = self._index_of.get(id(parameter))
            if index is None:
                msg = (
                    f"Parameter {position} of the new group, of shape {tuple(parameter.shape)}, is not one of the "
                    "boosted model's. Boost the model with all the parameters that it will have."
                )
                raise ConfigError(msg)
            if index in taken:
                msg = f"Parameter '{self.names[index]}' is in a parameter group already. Leave it out of the new one."
                raise ConfigError(msg)
        self.optim.add_param_group({**param_group, "params": given if isinstance(given, torch.Tensor) else list(given)})
        self._adopt_groups(self.optim.param_groups[-1:])

    def _agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Lay the buckets out in the order in which rank 0's backward produced gradients."""
        records = collectives.all_gather_object((order, late))
        first = dict.fromkeys(records[0][0])
        every = [slot.index for bucket in self.layout.buckets for slot in bucket.plan.slots]
        repeated = {index for _, indices in records for index in indices}
        new = [*first, *(index for index in every if index not in first)]
        if new != every:
            states = self.layout.rebuild(new, self.hosted.states())
            self.hosted.replace(self.layout.pieces(), states)
            self.reducer.set_buckets(self.layout.buckets)
        return repeated

    # ---- gradients

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss and reduce its gradients; see `OptimizerWrapper.backward`.

        Collective: every rank of the world; under stage 1's ``no_sync`` none.
        """
        with naming_missing_ranks("reduction of gradients"), self.reducer.guarded():
            super().backward(loss, inputs, retain_graph=retain_graph)

    def settle(self) -> None:
        """Bring all gradients into the shards, and let the optimizer inside see those of parameters that were used.

        Collective: every rank of the world.
        """
        self.reducer.settle()
        if self.reducer.num_rounds == self._agreed_rounds:
            return
        self._agreed_rounds = self.reducer.num_rounds
        indices = [slot.index for bucket in self.layout.buckets for slot in bucket.plan.slots]
        used = [index in self.reducer.used for index in indices]
        if self._config.unused == "raise":
            self._raise_for_unused([index for index, is_used in zip(indices, used, strict=True) if not is_used])
        changed = self._buffers.changed() if self._config.broadcast_buffers else []
        flags = torch.tensor([*used, *changed], dtype=torch.uint8, device=self._device())
        pending = [collectives.all_reduce(flags, dist.ReduceOp.MAX)]
        if self.ranks.replica_group is not None:
            pending += [
                collectives.all_reduce(bucket.gradient, dist.ReduceOp.AVG, self.ranks.replica_group)
                for bucket in self.layout.buckets
                if bucket.has_gradient and bucket.gradient is not None
            ]
        for each in pending:
            each.wait()
        anywhere = flags.bool().tolist()
        self._agreed = dict(zip(indices, anywhere[: len(indices)], strict=True))
        self._changed_buffers = anywhere[len(indices) :]
        for bucket in self.layout.buckets:
            bucket.show_gradient(self._agreed)

    def _raise_for_unused(self, unused: list[int]) -> None:
        every = collectives.all_gather_object(
            [self.names[index] for index in sorted(unused) if self.layout.parameters[index].requires_grad]
        )
        if any(every):
            listed = "; ".join(
                f"rank {rank}: {', '.join(map(repr, names[:10]))}{', ...' if len(names) > 10 else ''}"
                for rank, names in enumerate(every)
                if names
            )
            msg = (
                f"Parameters took no part in backward, which `unused='raise'` forbids. {listed}. Freeze them, leave "
                "them out of the optimizer, or pass `unused='zero'`."
            )
            raise GradientError(msg)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's pieces, averaged over ranks.

        Collective: every rank of the world, where there was a backward since the last call.
        """
        self.settle()
        return [
            piece.values.grad
            for bucket in self.layout.buckets
            for piece in bucket.pieces
            if piece.values.grad is not None and piece.values.numel()
        ]

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all shards of a replica, each element counted once."""
        group = self.ranks.shard_group or dist.group.WORLD
        return clip_by_norm(
            self.gradients(),
            max_norm,
            norm_type,
            groups=[] if group is None else [group],
            error_if_nonfinite=error_if_nonfinite,
        )

    def overflow_anywhere(self, overflow: bool) -> bool:  # noqa: FBT001 - as in core
        """Return whether a gradient overflowed on any rank.

        Collective: every rank of the world.
        """
        flag = torch.tensor([overflow], dtype=torch.uint8, device=self._device())
        collectives.all_reduce(flag, dist.ReduceOp.MAX).wait()
        return bool(flag.item())

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is in one of the optimizer's groups."""
        return self._index_of.get(id(parameter)) in self.layout.parameters

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of a parameter's whole gradient, without loss scale; ``None`` where no rank used it.

        Collective: every rank of the world.
        """
        index = self._index_of[id(parameter)]
        self.settle()
        if not self._agreed.get(index):
            return None
        bucket = self.layout.bucket_of(index)
        device = bucket.format.device
        whole = torch.zeros(parameter.numel(), dtype=bucket.format.master, device=device)
        for piece in bucket.pieces:
            if piece.index == index and piece.values.grad is not None:
                whole[piece.start : piece.stop] = piece.values.grad.flatten()
        collectives.all_reduce(whole, group=self.ranks.shard_group).wait()
        if self.loss_scaler is not None and not self.is_unscaled:
            whole /= self.loss_scaler.scale
        return whole.view(parameter.shape)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, reduced or not.

        Collective: none.
        """
        if set_to_none:
            self.reducer.clear()
            self._agreed = {}
        else:
            self.reducer.zero()
        super().zero_grad(set_to_none)

    # ---- stepping

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update this rank's pieces, and bring every rank's into all parameters; see `OptimizerWrapper.step`.

        Collective: every rank of the world.
        """
        if closure is None:
            self._clip_as_configured()
        return super().step(closure)

    def _clip_as_configured(self) -> None:
        if self._config.max_norm > 0 and self._grad_norm is None:
            self.clip_grad_by_norm(self._config.max_norm)

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside on this rank's pieces, then share them.

        Raises:
            ConfigError: If a parameter was given other memory since it was laid out.

        Collective: every rank of the world.
        """
        for bucket in self.layout.buckets:
            bucket.notice_changes(self.names)
        if closure is None:
            self.settle()
            used = [bucket for bucket in self.layout.buckets if self._is_used(bucket)]
            result = self._step_in_parts(used) if self._steps_in_parts else self.optim.step()
        else:

            def evaluated() -> float:
                loss = closure()
                self.settle()
                self._clip_as_configured()
                return loss

            result = self.optim.step(evaluated)
            used = [bucket for bucket in self.layout.buckets if self._is_used(bucket)]
        if closure is not None or not self._steps_in_parts:
            for bucket in used:
                bucket.house(self.hosted.states())
            self.publish(used)
        self._send_buffers()
        self.room.check_together(
            "The step was taken, and nothing is lost: what found no room stays in RAM and can be saved."
        )
        return result

    def _step_in_parts(self, buckets: Sequence[Bucket]) -> Any:
        """Step on one bucket after the other; what a bucket became is on its way while the next one is stepped."""
        result, pending = None, []
        groups = [list(group["params"]) for group in self.param_groups]
        for bucket in buckets:
            own = {id(piece.values) for piece in bucket.pieces if piece.values.grad is not None}
            if own:
                with only(self.optim, [[values for values in group if id(values) in own] for group in groups]):
                    result = self.optim.step()
                bucket.house(self.hosted.states())
            pending.append(bucket.publish())
        self._end_publishing(buckets, pending)
        return result

    def _is_used(self, bucket: Bucket) -> bool:
        return any(self._agreed.get(slot.index) for slot in bucket.plan.slots)

    def publish(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Bring what this rank's optimizer holds of some buckets, or all, into every rank's parameters.

        Collective: the shard group.
        """
        chosen = self.layout.buckets if buckets is None else buckets
        self._end_publishing(chosen, [bucket.publish() for bucket in chosen])

    def _end_publishing(self, buckets: Sequence[Bucket], pending: Sequence[Pending]) -> None:
        for each in pending:
            each.wait()
        # A graph that was built before the update must not be run backward after it, as everywhere in torch.
        for bucket in buckets:
            torch.autograd.graph.increment_version(bucket.parameters)
            bucket.note_versions()

    def _send_buffers(self) -> None:
        if not any(self._changed_buffers):
            return
        for buffer, has_changed in zip(self._buffers.buffers().values(), self._changed_buffers, strict=True):
            if has_changed:
                send_first(buffer)
        self._changed_buffers = []
        self._buffers.forget()

    def _device(self) -> torch.device:
        """Return where small flags live that are shared with other ranks."""
        return self.layout.buckets[0].format.device if self.layout.buckets else torch.device("cpu")
