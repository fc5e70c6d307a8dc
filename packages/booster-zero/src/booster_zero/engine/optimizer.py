"""`ShardedOptimizer`: the user's optimizer over this rank's pieces of parameters, made ready by reductions.

What comes after a step, and where whole parameters lie, is what strategies add.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, GradientError
from booster_core.gradients import clip_by_norm
from booster_core.plugin import OptimizerWrapper
from booster_core.ranks import naming_missing_ranks
from booster_core.state import NamedTensors
from booster_runtime import collectives
from booster_runtime.sharding import BufferWatch, HostedOptimizer, check_takes_parts, refuse_gradient, send_first
from booster_zero.engine.reducer import Reducer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import ShardedBucket
    from booster_zero.engine.layout import Layout


class ShardedOptimizer(OptimizerWrapper):
    """Steps the user's optimizer on this rank's part of every parameter.

    Args:
        optim: The user's optimizer; its groups list this rank's pieces from now on.
        model: The user's model.
        layout: What lies where; `lay_out` adds to it.
        ranks: The ranks that share the state.
        max_norm: Clip by this norm in each step before which nobody clipped; 0 does not.
        overlap: Go on with backward while buckets are being reduced.
        unused: ``"zero"`` or ``"raise"``: what to do about parameters that took no part in backward.
        partition: What the user asked of the layout: ``"flat"``, ``"parameter"`` or ``"auto"``.
        broadcast_buffers: Give every rank, after each step, rank 0's values of buffers that forward changes.
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
        layout: Layout[Any],
        ranks: ShardingRanks,
        max_norm: float,
        overlap: bool,
        unused: str,
        partition: str,
        broadcast_buffers: bool,
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
        self.ranks = ranks
        self.layout = layout
        self._max_norm = max_norm
        self._unused = unused
        self._partition = partition
        self._broadcast_buffers = broadcast_buffers
        self._agreed: dict[int, bool] = {}
        self._agreed_rounds = 0
        self._changed_buffers: list[bool] = []
        self._buffers = BufferWatch(model)
        self.hosted = HostedOptimizer(optim, self.names)
        self.reducer = Reducer((), self.names, overlap=overlap, agree_on_record=self.agree_on_record)
        self._adopt_groups(optim.param_groups)
        # What is trained may be left out of the optimizer, to stay as it is. What is unfrozen later is meant to train.
        held = {index for members in self.hosted.groups for index in members}
        self._refused = {
            index: refuse_gradient(parameter, self.names[index])
            for index, parameter in enumerate(parameters.values())
            if not parameter.requires_grad and index not in held
        }

    # ---- parameters and groups

    def _adopt_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over groups that the hosted optimizer lists but does not host yet."""
        members = [[self._index_of[id(parameter)] for parameter in group["params"]] for group in groups]
        by_index = {
            index: parameter
            for indices, group in zip(members, groups, strict=True)
            for index, parameter in zip(indices, group["params"], strict=True)
        }
        self._check_parameters(by_index)
        self.lay_out(by_index)
        pieces = self.layout.pieces()
        for indices in members:
            own = {index: pieces[index] for index in indices if index in pieces}
            self.hosted.adopt(len(self.hosted.groups), indices, own)
        for bucket in self.layout.buckets:
            bucket.house(self.hosted.states())
        self.reducer.set_buckets(self.buckets_in_order())

    def lay_out(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Put parameters into the layout, where they are not in it yet.

        Args:
            parameters: What new groups list, by number; checked.

        Collective: none; every rank adds the same.
        """
        raise NotImplementedError

    def buckets_in_order(self) -> Sequence[ShardedBucket]:
        """Return the buckets in the order in which they are to be reduced."""
        return self.layout.buckets

    def _check_parameters(self, parameters: Mapping[int, nn.Parameter]) -> None:
        for index, parameter in parameters.items():
            if not parameter.is_floating_point():
                msg = (
                    f"Parameter '{self.names[index]}' is of {parameter.dtype}; only floating parameters can be sharded."
                )
                raise ConfigError(msg)

    def listed_parameters(self) -> set[int]:
        listed = {index for members in self.hosted.groups for index in members}
        return {key for key, index in self._index_of.items() if index in listed}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the optimizer inside.

        Raises:
            ConfigError: If a parameter is not the model's, or is in a group already, or the optimizer takes this
                group's parameters as wholes while those of the others are cut.

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
        try:
            self.check_settings(self.optim.param_groups[-1])
        except ConfigError:
            self.optim.param_groups.pop()
            raise
        self._adopt_groups(self.optim.param_groups[-1:])
        for index in self.hosted.groups[-1]:
            handle = self._refused.pop(index, None)
            if handle is not None:
                handle.remove()

    def check_settings(self, group: Mapping[str, Any]) -> None:
        """Check that the optimizer inside can step on parts of the parameters of a group, as they are laid out.

        Raises:
            ConfigError: If it can't.

        Collective: none.
        """
        if self.layout.kind == "flat":
            check_takes_parts(self.unwrap(), self._partition, group)

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Return which parameters' gradients came again too late on any rank, at the end of the first round.

        Args:
            order: The parameters, in the order in which this rank's backward produced gradients.
            late: Those whose gradients came again after their bucket had left.

        Collective: every rank that holds the same parameters.
        """
        came = set(order)
        parameters = self.layout.parameters.items()
        unused = {index for index, parameter in parameters if parameter.requires_grad and index not in came}
        every = collectives.all_gather_object((late, unused), self.ranks.holders)
        self.reducer.unused_somewhere = {index for _, of_rank in every for index in of_rank}
        return {index for of_rank, _ in every for index in of_rank}

    def lay_out_anew(self, order: Sequence[int]) -> None:
        """Move everything to the places that it has when parameters lie in another order.

        Collective: every rank of the shard group.
        """
        states = self.layout.rebuild(order, self.hosted.states())
        self.hosted.replace(self.layout.pieces(), states)
        self.reducer.set_buckets(self.buckets_in_order())

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
        if self._unused == "raise":
            self._raise_for_unused([index for index, is_used in zip(indices, used, strict=True) if not is_used])
        changed = self._buffers.changed() if self._broadcast_buffers else []
        flags = torch.tensor([*used, *changed], dtype=torch.uint8, device=self._device())
        flagged = collectives.all_reduce(flags, dist.ReduceOp.MAX, self.ranks.holders)
        if self.ranks.replica_group is not None:
            self._average_over_replicas(self.ranks.replica_group)
        flagged.wait()
        anywhere = flags.bool().tolist()
        self.reducer.unused_anywhere = {index for index, is_used in zip(indices, anywhere, strict=False) if not is_used}
        self._agreed = self.join_copies(dict(zip(indices, anywhere[: len(indices)], strict=True)))
        self._changed_buffers = anywhere[len(indices) :]
        for bucket in self.layout.buckets:
            bucket.show_gradient(self._agreed)

    def join_copies(self, used: dict[int, bool]) -> dict[int, bool]:
        """Add up what other ranks than the holders have of the gradients, and return which parameters were used.

        There are none, unless a strategy keeps copies of a parameter at several places of one model.

        Args:
            used: By parameter, whether any of its holders used it.

        Collective: every rank of the strategy's mesh.
        """
        return used

    def _average_over_replicas(self, group: ProcessGroup) -> None:
        with contextlib.ExitStack() as stack:
            pending = []
            for bucket in self.layout.buckets:
                if bucket.has_gradient and not bucket.averages_at_once:
                    stack.enter_context(bucket.at_hand(changes=True))
                    pending.append(collectives.all_reduce(bucket.make_gradient(), dist.ReduceOp.AVG, group))
            for each in pending:
                each.wait()

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
        with bucket.at_hand(changes=False):
            for piece in bucket.pieces:
                if piece.index == index and bucket.gradient is not None:
                    whole[piece.start : piece.stop] = bucket.slice_of(bucket.gradient, piece).flatten()
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
        if self._max_norm > 0 and self._grad_norm is None:
            self.clip_grad_by_norm(self._max_norm)

    def update_pieces(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer inside on this rank's pieces, and share the buffers that forward has changed.

        Collective: every rank of the world.
        """
        if closure is None:
            self.settle()
            result = self.step_pieces()
        else:

            def evaluated() -> float:
                loss = closure()
                self.settle()
                self._clip_as_configured()
                return loss

            result = self.optim.step(evaluated)
            for bucket in self.layout.buckets:
                bucket.house(self.hosted.states())
        self._send_buffers()
        return result

    def step_pieces(self) -> Any:
        """Step the optimizer inside on pieces that show their gradients."""
        result = self.optim.step()
        for bucket in self.layout.buckets:
            bucket.house(self.hosted.states())
        return result

    def is_used(self, bucket: ShardedBucket) -> bool:
        """Whether any of a bucket's parameters took part in backward on any rank."""
        return any(self._agreed.get(slot.index) for slot in bucket.plan.slots)

    def _send_buffers(self) -> None:
        if not any(self._changed_buffers):
            return
        for buffer, has_changed in zip(self._buffers.buffers().values(), self._changed_buffers, strict=True):
            if has_changed:
                send_first(buffer, self.ranks.holders)
        self._changed_buffers = []
        self._buffers.forget()

    def _device(self) -> torch.device:
        """Return where small flags live that are shared with other ranks."""
        return self.layout.buckets[0].format.device if self.layout.buckets else torch.device("cpu")
