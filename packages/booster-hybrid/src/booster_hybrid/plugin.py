"""`HybridParallelPlugin`: tensor, pipeline, sequence and data parallelism behind `Booster`; wires their parts together.

Each axis is its own package: `tensor_parallel`, `sequence_parallel` and `pipeline`; data parallelism is booster-zero's.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.plugin import (
    Boosted,
    Capability,
    PipelinePlugin,
    boosted_inside,
    place_model,
    unscaled_gradient,
    unwrap_model,
)
from booster_core.precision import PrecisionPolicy, working_dtypes
from booster_core.ranks import Axis, make_axes
from booster_core.state import HolderRank, NamedTensors, named_modules, without_adapters
from booster_hybrid.agreement import check_same_settings
from booster_hybrid.config import HybridConfig, PipelineConfig, SequenceConfig, TensorConfig, check_used
from booster_hybrid.data_parallel import DataParallelConfig, zero_options
from booster_hybrid.lazy import fill_model
from booster_hybrid.mesh import AXES, COMMUNICATING, check_order
from booster_hybrid.model import HybridModel
from booster_hybrid.optimizer import HybridOptimizer, ModelPlace
from booster_hybrid.pipeline.draws import check_no_layer_is_skipped, kept_generators
from booster_hybrid.pipeline.engine import PipelineEngine
from booster_hybrid.pipeline.example import example_batch, to_device
from booster_hybrid.pipeline.p2p import Link
from booster_hybrid.pipeline.record import PipelineRecord
from booster_hybrid.pipeline.stages import StageMap, StagePlan, find_crossings
from booster_hybrid.pipeline.trace import trace_flow
from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_hybrid.place import MeshPlace
from booster_hybrid.policy.registry import policy_for
from booster_hybrid.state import HybridStateAdapter
from booster_hybrid.tensor_parallel.apply import TensorParallelModel, parallelize
from booster_hybrid.tensor_parallel.group import TensorGroup
from booster_hybrid.user_optimizer import check_elementwise, cut_state, leave_out
from booster_runtime import collectives
from booster_runtime.lazy import hollow_objects, is_lazy
from booster_runtime.sharding import ShardingRanks, agree_on_values, check_distinct_memory
from booster_zero import LowLevelZeroPlugin, ZeroConfig, ZeroStateAdapter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext
    from booster_core.precision import LossScaleConfig
    from booster_core.ranks import DistCoordinator
    from booster_core.state import StateAdapter
    from booster_hybrid.policy.base import ShardingPolicy


class HybridParallelPlugin(MeshPlace, PipelinePlugin):
    """Each layer split over tensor parallel ranks, and data parallelism over the ranks that these leave.

    Args:
        tp_size: Ranks over which each layer is split.
        pp_size: Ranks over which the layers are spread; batches then run through `execute_pipeline`.
        sp_size: Ranks over which each sequence is split, for ``"all_to_all"`` and ``"ring_attn"``.
        mesh_order: The axes of the mesh of ranks, from the outermost to the innermost: ranks of the last one are
            neighbours. Any order computes the same.
        zero_stage: 0 replicates the optimizer state over the data parallel ranks, 1 and 2 shard it by ZeRO.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.
        num_microbatches: See `PipelineConfig`, as for the following four.
        microbatch_size: Samples in each part of a batch.
        pp_style: Order of the parts' forwards and backwards.
        num_model_chunks: Stages on each rank.
        num_layers_per_stage: Number of layers of each stage.
        checkpoint_ratio: The part of each stage's layers that is computed anew in backward, to keep less: one number,
            or one for each stage. Early stages hold more microbatches at a time, so that more is saved there.
        example_batch: A batch such as the model will be trained with, for the dry run that finds its layers; ``None``
            looks at the data loader that is boosted, or takes the dummy that models of transformers bring.
        sequence_parallelism_mode: See `SequenceConfig`.
        parallel_output: Leave the logits of language models split by vocabulary (and by positions, where the model
            takes its own loss of split sequences): whole ones need not exist. ``outputs.logits`` look whole:
            `SplitLogits` compute the model's own loss and cross entropy from their parts, and any other function gets
            whole ones, which all ranks that have a part must ask for. ``False`` puts them together in each forward.
        max_norm: Clip gradients by this global norm in each step; 0 does not.
        cpu_offload: Keep optimizer state and masters on the host, and step there; for ``zero_stage`` 1 and 2.
        custom_policy: How the model is split, where it is not one that is known; see
            `booster_hybrid.policy.base.ShardingPolicy`.
        ddp: How data parallel ranks average gradients under ``zero_stage=0``.
        zero: All of ZeRO's options, in the place of ``zero_stage``, ``cpu_offload`` and ``max_norm``.
        loss_scale: How gradients are scaled under ``precision="fp16"``.
        pipeline_record: A folder where each rank of a pipeline writes down when it did what, for ``booster pipeline``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053).
    """

    name: ClassVar[str] = "hybrid"
    api_version: ClassVar[int] = 1
    handles_lazy: ClassVar[bool] = True
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.CPU,
            Capability.CUDA,
            Capability.FP32,
            Capability.BF16,
            Capability.FP16,
            Capability.LORA,
            Capability.PIPELINE,
            Capability.DATA_PARALLEL,
            Capability.SYNCHRONOUS,
        }
    )

    def __init__(
        self,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int = 1,
        mesh_order: Sequence[str] = AXES,
        zero_stage: int = 0,
        precision: PrecisionPolicy | str | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        pp_style: str = "1f1b",
        num_model_chunks: int | None = None,
        num_layers_per_stage: Sequence[int] | None = None,
        checkpoint_ratio: float | Sequence[float] | None = None,
        example_batch: Any = None,
        sequence_parallelism_mode: str | None = None,
        parallel_output: bool = True,
        max_norm: float = 0.0,
        cpu_offload: bool = False,
        custom_policy: ShardingPolicy | None = None,
        ddp: DataParallelConfig | None = None,
        zero: ZeroConfig | None = None,
        loss_scale: LossScaleConfig | None = None,
        pipeline_record: str | os.PathLike[str] | None = None,
    ) -> None:
        for option, value, kind in (("ddp", ddp, DataParallelConfig), ("zero", zero, ZeroConfig)):
            if value is not None and not isinstance(value, kind):
                msg = f"`{option}` is a `{kind.__name__}`; got `{type(value).__name__}`."
                raise TypeError(msg)
        sharded = zero_options(zero, zero_stage, max_norm, cpu_offload=cpu_offload)
        self.config = HybridConfig(
            tensor=TensorConfig(size=tp_size),
            pipeline=PipelineConfig(
                size=pp_size,
                num_microbatches=num_microbatches,
                microbatch_size=microbatch_size,
                style=pp_style,
                num_model_chunks=num_model_chunks,
                num_layers_per_stage=None if num_layers_per_stage is None else tuple(num_layers_per_stage),
                checkpoint_ratio=(
                    checkpoint_ratio
                    if checkpoint_ratio is None or isinstance(checkpoint_ratio, (int, float))
                    else tuple(checkpoint_ratio)
                ),
            ),
            sequence=SequenceConfig(size=sp_size, mode=sequence_parallelism_mode),
            zero=sharded,
            ddp=DataParallelConfig() if ddp is None and sharded is None else ddp,
            mesh_order=check_order(mesh_order),
        )
        self.parallel_output = parallel_output
        self.custom_policy = custom_policy
        self.example_batch = example_batch
        self.pipeline_record = pipeline_record
        check_used(
            self.config, custom_policy=custom_policy, example_batch=example_batch, pipeline_record=pipeline_record
        )
        if loss_scale is not None and precision is None:
            msg = "`loss_scale` is about fp16. Pass `precision='fp16'` beside it, or a PrecisionPolicy to `Booster`."
            raise ConfigError(msg)
        self.precision = None if precision is None else PrecisionPolicy.parse(precision, loss_scale=loss_scale)
        options = self.config.data_parallel(max_norm)
        self._zero = LowLevelZeroPlugin(
            **{each.name: getattr(options, each.name) for each in fields(options)}, precision=self.precision
        )

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the policy with working parameters in the compute format, and masters beside them where it is narrow.

        Raises:
            ConfigError: If fp32 compute is to have masters.
        """
        return self._zero.resolve_precision(policy)

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Split the model's layers, cut it into stages, and shard what the optimizer updates.

        Raises:
            ConfigError: If ranks have different settings, the sizes do not divide the world, the model has no policy,
                its sizes can't be split, or the optimizer needs whole matrices and layers are split.

        Collective: every rank of the world.
        """
        check_same_settings(self._settings(context), context.coordinator)
        axes = self._axes_of_world()
        model = objects.model
        check_distinct_memory(model)
        unchanged = replace(context.precision, param_dtype=None)
        recording = None
        if is_lazy(model):
            recording = hollow_objects(model, objects.optimizer, context.device, unchanged)
        else:
            place_model(model, objects.optimizer, context.device, unchanged)
            agree_on_values(model)
        tensor = axes["tp",]
        group = TensorGroup(tensor.group, tensor.index, tensor.size)
        policy = None
        check_elementwise(objects.optimizer, tensor.size)
        if tensor.size > 1 or self.config.pipeline.size > 1:
            policy = policy_for(model, self.custom_policy, context.hooks)
        # The dry run sees the whole model: nothing is communicated in it.
        plan = None if self.config.pipeline.size == 1 else self._plan_stages(objects, policy, context)
        split = TensorParallelModel()
        if tensor.size > 1 and policy is not None:
            split = parallelize(model, policy, group, parallel_output=self.parallel_output)
            cut_state(model, objects.optimizer, split)
        if self.config.sequence.mode is not None:
            _split_sequences(model, self, axes, context, split)
        copies: dict[int, tuple[int, ...]] = {}
        place = ModelPlace(tensor_group=group, splits=split.splits)
        staged, split_backward = None, None
        if plan is not None:
            place = self._place_of(plan, place, axes)
            copies = plan.copies(model)
            # Layers' forwards that split their backward lie inside of those that stages put around layers.
            split_backward = SplitBackward(model) if self.config.pipeline.style == "zbv" else None
            plan.checkpoint(model, self.config.pipeline.checkpoint_ratios)
            # What is not here still tells its format: models make tables in that of their embedding.
            staged = plan.cut(model, place.stage, working_dtypes(model, context.precision.param_dtype))
            leave_out(model, objects.optimizer)
        boosted = self._zero.shard(
            objects, context, self._ranks(axes), HybridOptimizer, model_class=HybridModel, copies=copies
        )
        hybrid: Any = boosted.model
        hybrid.place = place
        hybrid.replica = axes["pp", "sp", "tp"]
        if isinstance(boosted.optimizer, HybridOptimizer):
            boosted.optimizer.place = place
        if plan is not None and staged is not None:
            hybrid.stages = plan.stages
            staged.forward = hybrid.run_stage
            hybrid.engine = PipelineEngine(
                staged,
                self.config.pipeline,
                place.stage,
                self._link(plan, axes, context),
                replica=axes["pp", "sp", "tp"],
                data=axes["dp",],
                coordinator=context.coordinator,
                device=context.device,
                run_options={"split": split_backward, "record": self._record(axes, context)},
            )
        if recording is not None:
            adapter = self.state_adapter(hybrid, boosted.optimizer, context)
            fill_model(model, recording, adapter, context, has_optimizer=boosted.optimizer is not None)
        return boosted

    def _record(self, axes: Mapping[tuple[str, ...], Axis], context: BoostContext) -> PipelineRecord | None:
        if self.pipeline_record is None:
            return None
        rank = context.coordinator.rank
        ranks = axes["pp",].ranks
        return PipelineRecord(self.pipeline_record, rank, axes["pp",].index, min(ranks), context.device)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | None = None,
        *,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> Mapping[str, Any]:
        """Run forward and, with an optimizer, backward of one batch from ``data_iter`` through all stages.

        Args:
            data_iter: Yields batches, the same on all ranks of a pipeline: mappings of keyword arguments (of which
                those that the model's forward does not take are left to the criterion), lists or tuples of positional
                ones, or tensors.
            model: The boosted model.
            criterion: Called as ``criterion(outputs, microbatch)``, returns a mean over samples.
            optimizer: The boosted optimizer; ``None``, or gradients being off, evaluates without backward.
            return_loss: Return the batch's loss under ``"loss"``: the mean of its microbatches', by their samples;
                ``None`` on ranks without the last stage.
            return_outputs: Return the batch's outputs, detached, under ``"outputs"``; ``None`` likewise.

        Raises:
            StopIteration: If there is no batch left.
            ConfigError: If there is no pipeline, the batch can't be split, ranks of one pipeline have different ones,
                or the criterion returns no scalar.
            Exception: What the data loader, the model or the criterion raised on any rank.
            TypeError: If the model or the optimizer is not a boosted one.

        Collective: every rank of the world.
        """
        model = boosted_inside(model)
        if self.config.pipeline.size == 1:
            msg = (
                "`execute_pipeline` needs a pipeline, and `pp_size=1` makes none. Call the model, `booster.backward` "
                "and `optimizer.step`, or pass `pp_size`."
            )
            raise ConfigError(msg)
        if not isinstance(model, HybridModel) or model.engine is None:
            msg = f"`execute_pipeline` needs the model returned by `Booster.boost`; got `{type(model).__name__}`."
            raise TypeError(msg)
        if optimizer is not None and not isinstance(optimizer, HybridOptimizer):
            got = type(optimizer).__name__
            msg = f"`execute_pipeline` needs the optimizer returned by `Booster.boost`; got `{got}`."
            raise TypeError(msg)
        return model.engine.execute(
            data_iter,
            criterion,
            optimizer if torch.is_grad_enabled() else None,
            return_loss=return_loss,
            return_outputs=return_outputs,
        )

    def data_parallel_coordinates(self, coordinator: DistCoordinator) -> tuple[int, int]:
        """Return this rank's index along the data parallel axis, and its size."""
        shape = self._shape(coordinator.world_size)
        return shape.coordinates(coordinator.rank)["dp"], shape.sizes["dp"]

    def state_adapter(self, model: nn.Module, optimizer: Optimizer | None, context: BoostContext) -> StateAdapter:
        """Return the view of what is split and sharded, in the shapes of the user's own model."""
        del context
        axes = self._axes_of_world()
        hybrid = optimizer if isinstance(optimizer, HybridOptimizer) else None
        boosted: Any = boosted_inside(model)
        inner = ZeroStateAdapter(model, hybrid, HolderRank(axes["dp", "sp"].index, axes["dp", "sp"].size))
        return HybridStateAdapter(
            inner,
            boosted.place.splits,
            is_first=axes["tp",].index == 0,
            stages=boosted.stages,
            stage=boosted.place.stage,
        )

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate here; under ZeRO 2 each is reduced into its shard."""
        return self._zero.no_sync(model, optimizer)

    def parameter_paths(self, model: nn.Module) -> Mapping[str, str]:
        """Return the names of the whole model's parameters, also of those on other stages, and where they are."""
        boosted: Any = boosted_inside(model)
        if boosted.stages is None:
            return super().parameter_paths(model)
        stages: StageMap = boosted.stages
        named = {name: path for name, path in stages.paths.items() if name in stages.parameters}
        return {**{path: path for path in named.values()}, **named}

    def full_gradient(self, model: nn.Module, optimizer: Optimizer | None, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter, in the shape that it has in the user's model, on every rank."""
        boosted: Any = boosted_inside(model)
        place: ModelPlace = boosted.place
        hybrid = optimizer if isinstance(optimizer, HybridOptimizer) else None
        if hybrid is not None:
            hybrid.settle()
        whole = None
        owner = 0 if boosted.stages is None else boosted.stages.owner(boosted.stages.name_at(name))
        if place.stage == owner:
            parameter = unwrap_model(model).get_parameter(name)
            whole = self._gradient_here(boosted, hybrid, parameter)
        return place.from_stage(whole, owner)

    def _gradient_here(
        self, model: HybridModel, optimizer: HybridOptimizer | None, parameter: nn.Parameter
    ) -> Tensor | None:
        if optimizer is not None and optimizer.holds(parameter):
            return optimizer.full_gradient(parameter)
        own = unscaled_gradient(parameter, optimizer)
        data = self._axes_of_world()["dp", "sp"]
        if not any(collectives.all_gather_object(own is not None, data.group)):
            return None
        whole = torch.zeros_like(parameter) if own is None else own.contiguous()
        collectives.all_reduce(whole, group=data.group).wait()
        name = NamedTensors.of(model.unwrap()).name_of[id(parameter)]
        return model.place.put_together(name, whole / data.size)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return {
            **asdict(self.config),
            "max_norm": self._zero.config.max_norm,
            "parallel_output": self.parallel_output,
        }

    def _settings(self, context: BoostContext) -> Mapping[str, object]:
        """Return what must be the same on every rank; a folder may be another on each host."""
        settings = dict(self.describe())
        if self.config.zero is not None:
            settings["zero"] = {**asdict(self.config.zero), "offload_dir": None}
        return {**settings, "custom_policy": self.custom_policy, "precision": asdict(context.precision)}

    def _plan_stages(self, objects: Boosted, policy: ShardingPolicy | None, context: BoostContext) -> StagePlan:
        """Return what a dry run on the first rank has seen, and what follows from it.

        Collective: every rank of the world.
        """
        model, error, found = objects.model, None, None
        config = self.config.pipeline
        if context.coordinator.rank == 0:
            try:
                batch = to_device(example_batch(model, objects.dataloader, self.example_batch), context.device)
                paths = {name: path for name, path, _ in named_modules(model)}  # adapters are around the model
                lists = [paths.get(name, name) for name in (() if policy is None else policy.layers)]
                with kept_generators():
                    trace, flow = trace_flow(model, lists, batch)
                    if objects.optimizer is not None:
                        check_no_layer_is_skipped(model, trace, lambda draws: trace_flow(model, lists, batch, draws)[0])
                    found = trace, find_crossings(model, trace, flow, config, batch)
            except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
                error = caught
        context.coordinator.raise_together(error, name="boost")
        trace, crossings = context.coordinator.broadcast_object(found, name="boost")
        return StagePlan.of(model, trace, crossings, config)

    def _place_of(self, plan: StagePlan, place: ModelPlace, axes: Mapping[tuple[str, ...], Axis]) -> ModelPlace:
        """Return where this rank is in the pipeline.

        Collective: every rank of the world.
        """
        stage = axes["pp",].index
        shape = self._shape(dist.get_world_size())
        groups = {}
        for holders in plan.stages.shared():
            for ranks in shape.groups(("pp",)):  # every rank makes every group, in the same order
                members = [ranks[holder] for holder in holders]
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    groups[holders] = group
        return replace(
            place,
            stage=stage,
            pipeline=axes["pp",].group,
            is_owner=lambda name: plan.stages.owner(name) == stage,
            copy_groups=groups,
        )

    def _link(self, plan: StagePlan, axes: Mapping[tuple[str, ...], Axis], context: BoostContext) -> Link:
        """Return the way to the other ranks of the pipeline.

        Collective: every rank of the world.
        """
        up = axes["pp",]
        down = make_axes(self._shape(dist.get_world_size()), [("pp",)])["pp",]
        return Link(plan.sent_names, up.ranks, up.index, up.group, down.group, context.device)

    def _axes_of_world(self) -> dict[tuple[str, ...], Axis]:
        """Return this rank's place; process groups are made once for each world."""
        world = dist.group.WORLD
        if self._axes is None or self._axes[0] is not world:
            self._axes = (world, make_axes(self._shape(dist.get_world_size()), COMMUNICATING))
        return self._axes[1]

    def _ranks(self, axes: Mapping[tuple[str, ...], Axis]) -> ShardingRanks:
        """Return who shares the optimizer's state: the data parallel ranks, or nobody, who are then replicas."""
        data = axes["dp", "sp"]
        if self.config.zero is None:
            return ShardingRanks(
                shard_group=axes[()].group,
                shard_rank=0,
                shard_size=1,
                replica_group=data.group if data.size > 1 else None,
                replica_rank=data.index,
                holders=data.group,
            )
        return ShardingRanks(shard_group=data.group, shard_rank=data.index, shard_size=data.size, holders=data.group)


def _split_sequences(
    model: nn.Module,
    plugin: HybridParallelPlugin,
    axes: Mapping[tuple[str, ...], Axis],
    context: BoostContext,
    split: TensorParallelModel,
) -> None:
    """Let the model's layers work on a part of each sequence."""
    from booster_hybrid.sequence_parallel.apply import split_sequences
    from booster_hybrid.sequence_parallel.split_gather import split_between_blocks

    model = without_adapters(model)
    policy = policy_for(model, plugin.custom_policy, context.hooks)
    lists = [name for name in policy.layers if name not in policy.whole_sequences]
    tensor, sequence = axes["tp",], axes["sp",]
    mode = str(plugin.config.sequence.mode)
    if mode == "split_gather":
        group = TensorGroup(tensor.group, tensor.index, tensor.size)
        split_between_blocks(model, lists, group, axes[()].group, split)
        return
    split_sequences(
        model,
        lists,
        mode,
        TensorGroup(sequence.group, sequence.index, sequence.size),
        tensor_size=tensor.size,
        parallel_output=plugin.parallel_output,
    )
