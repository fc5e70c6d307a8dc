"""`HybridEngine` and `HybridOptimizer`: ZeRO where other ranks than the data parallel ones hold other parts.

Tensor parallel ranks hold parts of a parameter, and so do those that experts are spread over; ranks of other pipeline
stages hold other parameters, and copies of those that several stages use. A copy gets the gradients of its own stage's
uses; they are added up, slice by slice, once the data parallel ranks have averaged theirs, so that all copies take the
same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.gradients import clip_by_norm
from booster_core.plugin import check_loss
from booster_core.state import NamedTensors
from booster_runtime import collectives
from booster_runtime.sharding import control_device, is_by_matrix, keeps_blocks, partition_for
from booster_zero import ShardedOptimizer
from booster_zero.engine import ShardedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_hybrid.gathered_matrices import GatheredMatrices, Part
    from booster_hybrid.state import LocalModel
    from booster_hybrid.tensor_parallel.split import Split
    from booster_hybrid.weight_reads import DirectWeightUses
    from booster_zero import ZeroConfig
    from booster_zero.engine import Bucket


_STACKED = 3
"""Dimensions of a stack of matrices."""


def check_experts(
    optimizer: Optimizer,
    spread: Mapping[int, str],
    ep_size: int,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Refuse what would take a part of the experts for all of them.

    Args:
        optimizer: The user's optimizer. One that updates matrices by themselves may list stacks of them, of which each
            rank has whole matrices.
        spread: The names of the parameters of experts that are spread over ranks, by ``id``.
        ep_size: Number of these ranks.
        groups: The groups that are looked at; all of the optimizer's by default.

    Raises:
        ConfigError: If the optimizer takes a parameter of experts as a whole.
    """
    groups = optimizer.param_groups if groups is None else groups
    if not spread or partition_for(optimizer, "auto") == "flat":
        return
    for parameter in (each for group in groups for each in group["params"] if id(each) in spread):
        if not is_by_matrix(optimizer) or parameter.dim() < _STACKED:
            msg = (
                f"{type(optimizer).__qualname__} updates '{spread[id(parameter)]}' {tuple(parameter.shape)} as a "
                f"whole, of which `ep_size={ep_size}` leaves each rank a part. Give the parameters of experts to an "
                "optimizer that treats every element alike, such as AdamW, or stacked matrices to "
                "`booster_runtime.Muon`; or use `ep_size=1`."
            )
            raise ConfigError(msg)


def check_state(optimizer: Optimizer, tp_size: int) -> None:
    """Refuse state that can't be cut as the layers are.

    Raises:
        ConfigError: If the optimizer keeps such state.
    """
    if tp_size > 1 and keeps_blocks(optimizer):
        msg = (
            f"{type(optimizer).__qualname__} keeps its state in few bits, by blocks of whole matrices, of which "
            f"`tp_size={tp_size}` leaves each rank a part. Use another optimizer, or `tp_size=1`."
        )
        raise ConfigError(msg)


def cut_state(model: nn.Module, optimizer: Optimizer, splits: Mapping[str, Split]) -> None:
    """Keep this rank's part of the state that an optimizer has already.

    Args:
        model: The model, whose parameters are split.
        optimizer: One of the user's optimizers.
        splits: Which parameters are, by name.
    """
    name_of = NamedTensors.of(model).name_of
    for parameter, state in optimizer.state.items():
        part = splits.get(name_of.get(id(parameter), ""))
        for key, value in state.items():
            if part is not None and hasattr(value, "shape") and tuple(value.shape) == part.global_shape:
                state[key] = part.take(value)


def leave_out(model: nn.Module, optimizer: Optimizer) -> None:
    """Drop from an optimizer what has left the model; groups stay, empty ones too."""
    present = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        is_kept = [id(parameter) in present for parameter in group["params"]]
        for parameter, kept in zip(group["params"], is_kept, strict=True):
            if not kept:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter, kept in zip(group["params"], is_kept, strict=True) if kept]
        if "param_names" in group:
            group["param_names"] = [name for name, kept in zip(group["param_names"], is_kept, strict=True) if kept]


_IN_SHARDS = 2
"""The first stage of ZeRO that keeps gradients in shards alone."""


class HybridEngine(ShardedEngine):
    """Adds up the gradients of copies that several stages hold.

    Args:
        *args: As for `ShardedEngine`.
        local: What of the model this rank holds.
        waits_in_backward: Whether backward may wait for the reductions of other ranks from the first round on, where
            forward gathers: it may not if these also wait there for this one. ``None`` where nothing is gathered.
        **kwargs: As for `ShardedEngine`.

    Attributes:
        joined: The numbers of the optimizers whose copies' gradients have been added up since they were dropped.
        num_parts: By how many the gradients of a pipeline's microbatches are divided; see `divide_by`.
    """

    config: ZeroConfig

    def __init__(self, *args: Any, local: LocalModel, waits_in_backward: bool | None = None, **kwargs: Any) -> None:
        self.local = local
        self._waits_in_backward = waits_in_backward
        self.joined: set[int] = set()
        self.num_parts = 1
        super().__init__(*args, **kwargs)
        if waits_in_backward is not None:
            self.reducer.waits_in_backward = False

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Agree on what the first round has shown; see `ShardedEngine.agree_on_record`.

        Collective: every rank that holds the same parameters.
        """
        found = super().agree_on_record(order, late)
        if self._waits_in_backward is not None:
            # A rank that waits for a reduction gathers nothing, which others may wait for before they start theirs.
            self.reducer.waits_in_backward = self._waits_in_backward and not self.reducer.unused_somewhere
        return found

    def divide_by(self, count: int) -> int:
        """Divide what comes of backward from now on where it is reduced, and return by how much.

        The losses of a batch's microbatches are multiplied by it: so what joins backward elsewhere, as losses of
        routers that a layer attaches, is averaged over microbatches as losses are, instead of added up.

        Args:
            count: Number of microbatches, alike on all ranks; without effect while gradients of an earlier batch are
                not reduced yet.
        """
        if not self.reducer.has_local:
            self.num_parts = count
        self._tell_num_parts()
        return self.num_parts

    def _tell_num_parts(self) -> None:
        for bucket in self.layout.buckets:
            bucket.num_parts = self.num_parts

    def join_tied_uses(self, used: dict[int, bool]) -> dict[int, bool]:
        """Add up the gradients of what several stages hold.

        Collective: every rank of the pipeline.
        """
        local = self.local
        if local.pipeline is None:
            return used
        buckets = self.copied_buckets()
        pending = []
        for bucket, copies in buckets:
            if bucket.has_gradient and bucket.gradient is not None:
                summed = bucket.gradient.to(bucket.format.device)  # from the host, where it is offloaded
                pending.append(
                    (collectives.all_reduce(summed, group=local.copy_groups[copies]), summed, bucket.gradient)
                )
        for each, summed, gradient in pending:
            each.wait()
            if summed is not gradient:
                gradient.copy_(summed)
        for bucket, copies in buckets:
            indices = [slot.index for slot in bucket.plan.slots]
            group = local.copy_groups[copies]
            told = [used.get(index, False) for index in indices]
            flags = torch.tensor(told, dtype=torch.uint8, device=control_device(self.device, group))
            collectives.all_reduce(flags, dist.ReduceOp.MAX, group).wait()
            used.update(zip(indices, flags.bool().tolist(), strict=True))
        self.joined = {bucket.format.optimizer for bucket, _ in buckets}
        return used

    def copied_buckets(self) -> list[tuple[Bucket, tuple[int, ...]]]:
        """Return the buckets of which other stages hold a copy, in an order that they agree on."""
        held = [(bucket, bucket.format.copies) for bucket in self.layout.buckets if bucket.format.copies]
        return sorted(held, key=lambda item: (item[1], self.names[item[0].plan.slots[0].index]))


class HybridOptimizer(ShardedOptimizer):
    """Counts what is split over ranks on each of them, and what is whole or copied on the first alone.

    Args:
        engine: As for `ShardedOptimizer`.
        *args: As for `ShardedOptimizer`.
        outside_reads: Looks at losses; ``None`` where each rank has whole parameters.
        **kwargs: As for `ShardedOptimizer`.

    Attributes:
        reduces_each: Whether gradients are reduced after each backward rather than once: they are kept in shards alone.
    """

    engine: HybridEngine

    def __init__(
        self, engine: HybridEngine, *args: Any, outside_reads: DirectWeightUses | None = None, **kwargs: Any
    ) -> None:
        self._outside_reads = outside_reads
        self.reduces_each = engine.config.stage >= _IN_SHARDS
        self._matrices: GatheredMatrices | None = None
        super().__init__(engine, *args, **kwargs)

    @property
    def local(self) -> LocalModel:
        """What of the model this rank holds."""
        return self.engine.local

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Check that the optimizer inside can step on this rank's parts of a group's parameters.

        Raises:
            ConfigError: If it can't.
        """
        numbers = [self.engine.index_of.get(id(each)) for each in group["params"]]
        spread = {
            id(each): self.names[number]
            for each, number in zip(group["params"], numbers, strict=True)
            if number is not None and self.names[number] in self.local.expert_splits
        }
        check_experts(self.unwrap(), spread, self.local.expert_group.size, [group])
        super().check_group(group)

    def set_model(self, model: nn.Module, norm_dtype: torch.dtype) -> None:
        """Learn of the model; see `OptimizerWrapper.set_model`. Stages have other parameters each."""
        super().set_model(model, norm_dtype)
        if self.local.pipeline is not None:
            self.compared_parameters = {}

    def step_inside(self) -> Any:
        """Step the user's optimizer, on whole matrices if it updates these and ranks have parts of them.

        Collective: the tensor parallel ranks in that case.
        """
        parts = self._parts_of_matrices()
        if not parts:
            return super().step_inside()
        if self._matrices is None:
            from booster_hybrid.gathered_matrices import GatheredMatrices

            self._matrices = GatheredMatrices(self.unwrap(), self.local.tensor_group, self.engine.device)
        return self._matrices.step(parts, super().step_inside)

    def update_parameters(self, closure: Callable[[], float] | None = None) -> Any:
        """Step on this rank's pieces, then share them; see `ShardedOptimizer.update_parameters`.

        Raises:
            ConfigError: If the optimizer inside is to evaluate the model while parts of matrices are together.

        Collective: every rank of the world.
        """
        if closure is not None and self._parts_of_matrices():
            msg = (
                f"{type(self.unwrap()).__qualname__} updates whole matrices, which `tp_size` splits between its steps: "
                "it can't evaluate the model within one. Call `step()` without a closure, or use `tp_size=1`."
            )
            raise ConfigError(msg)
        return super().update_parameters(closure)

    def _parts_of_matrices(self) -> list[Part]:
        """Return what this rank has of split parameters that the optimizer inside takes as wholes."""
        if self.local.tensor_group.size == 1 or self.engine.partition_of(self.number) == "flat":
            return []
        from booster_hybrid.gathered_matrices import Part

        splits = self.local.splits
        pieces = [(self.names[piece.index], piece.values) for bucket in self.buckets() for piece in bucket.pieces]
        return [Part(name, splits[name], values) for name, values in pieces if name in splits]

    # ---- backward of a pipeline

    def backward(self, loss: Tensor, inputs: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward from a loss and reduce its gradients; see `OptimizerWrapper.backward`.

        Raises:
            ConfigError: If the model is cut into pipeline stages.

        Collective: every rank of the world; under ``no_sync`` none.
        """
        if self.local.pipeline is not None:
            msg = (
                "The model is cut into pipeline stages, whose forward and backward are interleaved: call "
                "`booster.execute_pipeline(data_iter, model, criterion, optimizer)` in place of the forward and "
                "`booster.backward`."
            )
            raise ConfigError(msg)
        if self._outside_reads is not None:
            self._outside_reads.check(loss)
        super().backward(loss, inputs, retain_graph=retain_graph)

    def begin_batch(self, num_microbatches: int) -> int:
        """Make ready for the backwards of one batch.

        Args:
            num_microbatches: The largest number of microbatches on any rank.

        Returns:
            By what losses are multiplied; see `HybridEngine.divide_by`. 1 under fp16, whose range is narrow.
        """
        self.engine.gatherer.wait()
        self.reducer.before_forward()
        factor = self.engine.divide_by(num_microbatches if self.loss_scaler is None else 1)
        # What has been added up is on every copy: from now on it counts on the first alone.
        for bucket, copies in self.engine.copied_buckets() if self.engine.joined else ():
            if self.local.stage != copies[0] and bucket.format.optimizer in self.engine.joined:
                bucket.zero_gradient()
        self.engine.joined.clear()
        return factor

    def backward_stage(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], *, is_last: bool) -> None:
        """Run backward of one stage and microbatch; the last one of a batch begins to reduce what has come together.

        Under stage 2 each is reduced into its shard at once. Reductions of the last one go on until `finish_batch`.

        Args:
            tensors: What to begin with; none on a rank that only takes part in reductions.
            gradients: Their gradients; ``None`` for a loss, which is scaled where the precision asks for it.
            is_last: Whether this is the rank's last backward of the batch.

        Raises:
            GradientError: If a loss has no gradient.

        Collective: the data parallel ranks; under ``no_sync`` none.
        """
        before = self.reducer.is_paused
        error: Exception | None = None
        self.reducer.is_paused = before or not (is_last or self.reduces_each)
        try:
            with self.reducer.guarded(ends=not is_last):
                try:
                    self._run_backward(tensors, gradients)
                except Exception as caught:  # noqa: BLE001 - after the round, which the other ranks take part in
                    error = caught
        finally:
            self.reducer.is_paused = before
        if error is not None:
            raise error

    def _run_backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if not tensors:
            return
        if gradients[0] is None:
            (loss,) = tensors
            check_loss(loss)
            scale = self.scaling.factors.scale
            tensors = [loss if scale is None else loss.float()]
            gradients = [torch.full_like(tensors[0], 1.0 if scale is None else scale)]
        torch.autograd.backward(tensors, gradients)

    def finish_batch(self, *, missing_rounds: int) -> None:
        """Wait for what the last backward has begun to reduce.

        Args:
            missing_rounds: Backwards that other data parallel ranks have had more, of batches with more parts.

        Collective: the data parallel ranks; under ``no_sync`` none.
        """
        if self.reducer.is_paused:
            return
        with self.reducer.guarded():
            pass
        for _ in range(missing_rounds if self.reduces_each else 0):
            with self.reducer.guarded():
                pass

    # ---- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop (or zero) all gradients, reduced or not."""
        super().zero_grad(set_to_none)
        self.engine.joined.discard(self.number)

    def clip_gradients(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over the whole model, each element counted once."""
        gradients = [gradient for each in self.scaling.optimizers for gradient in each.gradients()]
        local = self.local
        shares_over_experts = self.engine.ranks.shard_size > 1
        counted = []
        for piece, gradient in (each for bucket in self.layout.buckets for each in bucket.used_pieces()):
            name = self.names[piece.index]
            split = local.splits.get(name)
            if not gradient.numel() or not local.is_owner(name):
                continue
            if not shares_over_experts and name not in local.expert_splits and local.expert_group.rank:
                continue
            if split is not None:
                counted.append(split.counted(gradient, piece.start))
            elif local.tensor_group.rank == 0:
                counted.append(gradient)
        # Shards of everything are spread over all data parallel ranks, the experts' over those with the same experts.
        sharing = self.engine.ranks.shard_group if shares_over_experts else local.expert_group.group
        groups = [sharing, local.tensor_group.group, local.pipeline]
        return clip_by_norm(
            gradients,
            max_norm,
            norm_type,
            counted=counted,
            groups=[group for group in groups if group is not None and dist.get_world_size(group) > 1],
            device=self.engine.device,
            dtype=self.norm_dtype,
            error_if_nonfinite=error_if_nonfinite,
        )

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of a parameter's gradient in the whole model's shape; ``None`` where no rank used it.

        Collective: every rank that holds the parameter; where there was a backward since the last call, every rank of
        the world.
        """
        local = super().full_gradient(parameter)
        return (
            None if local is None else self.local.put_together(self.names[self.engine.index_of[id(parameter)]], local)
        )
