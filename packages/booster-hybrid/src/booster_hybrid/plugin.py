"""`HybridParallelPlugin`: all kinds of parallelism behind `Booster`; wires their parts together.

Each axis is its own package: `tensor_parallel`, `sequence_parallel`, `expert_parallel` and `pipeline`; data parallelism
is booster-zero's.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.plugin import (
    Boosted,
    Capability,
    PipelinePlugin,
    boosted_inside,
    check_argument_types,
    unscaled_gradient,
    unwrap_model,
)
from booster_core.precision import PrecisionPolicy
from booster_core.ranks import DistCoordinator
from booster_core.state import NamedTensors, Replica
from booster_hybrid.boosting import shard
from booster_hybrid.config import (
    DataParallelConfig,
    HybridConfig,
    PipelineConfig,
    check_used,
    checked_choice,
    sequence_config,
    zero_options,
)
from booster_hybrid.mesh import AXES, MeshAttributes, check_order, make_groups, meshes_to_plan
from booster_hybrid.model import HybridModel
from booster_hybrid.optimizer import HybridOptimizer
from booster_hybrid.pipeline.batches import cut_batch
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.state import HybridStateAdapter
from booster_hybrid.weight_reads import parts_of
from booster_runtime import collectives
from booster_runtime.data import show_first_batch
from booster_runtime.sharding import refuse_renormalized
from booster_runtime.strategy import OF_LOSS_SCALE, OF_MODEL, OF_PRECISION, STRATEGY_TRAINING, Strategy
from booster_zero import LowLevelZeroPlugin, ShardedStateAdapter, ZeroConfig, fill_model
from booster_zero.engine import engine_of, holder_of, set_gradient

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, ModelWrapper
    from booster_core.precision import LossScaleConfig
    from booster_hybrid.mesh import Mesh
    from booster_hybrid.pipeline.batches import SplitHook
    from booster_hybrid.pipeline.stages import StageMap
    from booster_hybrid.policy.base import ShardingPolicy
    from booster_hybrid.state import LocalModel
    from booster_runtime.lazy import Recording


class HybridParallelPlugin(MeshAttributes, Strategy, PipelinePlugin):
    """Combine tensor, pipeline, sequence and data parallelism; data parallelism uses the remaining ranks.

    Args:
        tp_size: Ranks over which each layer is split.
        pp_size: Number of pipeline ranks; batches then run through `train_batch` or `execute_pipeline`.
        sp_size: Ranks over which ``context_parallel`` splits a sequence.
        ep_size: Ranks over which the experts of each layer are spread, out of the data parallel ones: it divides their
            number. They send each other the tokens of their batches, so that they must call the model equally often.
        mesh_order: The axes of the mesh from the outermost to the innermost, whose ranks are adjacent. The order does
            not change results.
        zero_stage: 0 replicates the optimizer state over the data parallel ranks, 1 shards it, 2 shards gradients as
            well, and 3 parameters as well: those of a layer are gathered for its forward and its backward, and with
            ``pp_size`` all of a rank once for each batch.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.
        num_microbatches: Number of microbatches of a batch; ``pp_size`` if neither this nor ``microbatch_size`` is
            given.
        microbatch_size: Samples in each microbatch, instead.
        pp_style: Order of the microbatches' forward and backward passes: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``,
            or ``"zbv"``.
        num_model_chunks: Stages on each rank: 1, and 2 by default for ``"interleaved"`` and ``"zbv"``.
        num_layers_per_stage: Number of layers of each stage; balanced by default.
        checkpoint_ratio: Fraction of each stage's layers that store only their inputs and are recomputed in backward:
            one number, or one for each stage (early stages hold more microbatches). ``None`` leaves it to the model.
        example_batch: A batch by which `boost` finds the layers of a pipeline, or those whose sequences are split, and
            checks what splits layers; by default from the data loader, or the dummy inputs of transformers' models.
        split_batch: Splits a batch into microbatches, in place of a split of each tensor's first dimension: called as
            ``split_batch(batch, num_microbatches)``, it returns a pair ``(microbatch, num_samples)`` for each.
        sequence_parallel: Split sequences between the blocks of layers, over the ``tp_size`` ranks.
        context_parallel: Split them over ``sp_size`` ranks, and attention as well: ``"ulysses"`` or ``"ring"``.
        sequence_parallelism_mode: The same by Colossal-AI's names: ``"split_gather"``, ``"all_to_all"`` or
            ``"ring_attn"``.
        parallel_output: Keep the logits of language models sharded (by vocabulary, and by positions where the model
            computes its own loss of split sequences), so that they are gathered only where needed, see `SplitLogits`.
            ``False`` gathers them in each forward.
        unchecked: What `boost` does about layers of which it can't find out whether they compute the same when
            ``tp_size`` splits them: ``"raise"``, or ``"allow"`` to trust the policy. Backward likewise does about
            a loss that reads a part of a parameter, such as a penalty on split weights.
        max_norm: Clip gradients by this global norm in each step; 0 disables clipping.
        cpu_offload: Offload optimizer state and masters to host memory and step there, for ``zero_stage`` 1 to 3.
        custom_policy: A `ShardingPolicy` for a model that is not known.
        ddp: How gradients are averaged under ``zero_stage=0``.
        zero: All of ZeRO's options, instead of ``zero_stage``, ``cpu_offload`` and ``max_norm``.
        loss_scale: Settings of dynamic loss scaling, for ``precision="fp16"``.
        config: The mesh, how sequences and batches are split, and the data axis, in one value, in place of the
            arguments about these.
        pipeline_record: A folder to which each rank of a pipeline writes its schedule, for ``booster trace``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053).
    """

    name: ClassVar[str] = "hybrid"
    api_version: ClassVar[int] = 2
    placeholders: ClassVar[Literal["device", "own"] | None] = "own"
    capabilities: ClassVar[frozenset[Capability]] = STRATEGY_TRAINING | {
        Capability.DATA_PARALLEL,
        Capability.PIPELINE,
        Capability.SEVERAL_OPTIMIZERS,
    }
    renamed_arguments: ClassVar[Mapping[str, str]] = {
        **{name: f"pass `loss_scale=LossScaleConfig({name}=...)`" for name in OF_LOSS_SCALE},
        **OF_PRECISION,
        **OF_MODEL,
        "inner_ring_size": "leave it out: keys go round one ring of all `sp_size` ranks",
        **dict.fromkeys(
            ("scheduler_nodes", "enable_metadata_cache", "overlap_p2p"), "leave it out: the pipeline finds out"
        ),
        **dict.fromkeys(
            ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "check_reduction"),
            "leave it out: unused parameters are found; `ddp=DataParallelConfig(unused='raise')` names them",
        ),
        **{
            name: f"pass `zero=ZeroConfig({name}=...)`"
            for name in ("communication_dtype", "overlap_communication", "overlap_allgather")
        },
        "zero_bucket_size_in_m": "pass `zero=ZeroConfig(bucket_bytes=...)`, in bytes",
        "broadcast_buffers": "pass `ddp=DataParallelConfig(broadcast_buffers=...)`",
        "ddp_bucket_cap_mb": "pass `ddp=DataParallelConfig(bucket_bytes=...)`, in bytes",
        "enable_sequence_parallelism": "pass `sequence_parallel=True`, or `context_parallel=` with `sp_size=`",
        "dp_outside": "pass `mesh_order=`, the axes from the outermost to the innermost",
        "moe_dp_outside_pp": "pass `mesh_order=`, the axes from the outermost to the innermost",
        "gradient_checkpoint_config": "pass `checkpoint_ratio=`, one number or one for each stage",
        "make_vocab_size_divisible_by": "leave it out: vocabularies are split unevenly",
        **dict.fromkeys(
            ("force_overlap_comm", "use_kernel", "enable_load_balance"),
            "leave it out: kernels of experts are those of transformers (`model.set_experts_implementation`)",
        ),
    }

    def __init__(
        self,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int = 1,
        ep_size: int = 1,
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
        split_batch: SplitHook | None = None,
        sequence_parallel: bool = False,
        context_parallel: str | None = None,
        sequence_parallelism_mode: str | None = None,
        parallel_output: bool = True,
        unchecked: Literal["raise", "allow"] = "raise",
        max_norm: float = 0.0,
        cpu_offload: bool = False,
        custom_policy: ShardingPolicy | None = None,
        ddp: DataParallelConfig | None = None,
        zero: ZeroConfig | None = None,
        loss_scale: LossScaleConfig | None = None,
        config: HybridConfig | None = None,
        pipeline_record: str | os.PathLike[str] | None = None,
    ) -> None:
        if config is not None:
            _refuse_beside_config(HybridParallelPlugin.__init__, locals())
        check_argument_types(HybridParallelPlugin.__init__.__annotations__, {**locals(), "return": None})
        configs = (("ddp", ddp, DataParallelConfig), ("zero", zero, ZeroConfig), ("config", config, HybridConfig))
        for option, value, kind in configs:
            if value is not None and not isinstance(value, kind):
                msg = f"`{option}` is a `{kind.__name__}`; got `{type(value).__name__}`."
                raise TypeError(msg)
        sharded = zero_options(zero, zero_stage, max_norm, cpu_offload=cpu_offload)
        self.config = config or HybridConfig(
            tp_size=tp_size,
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
            sequence=sequence_config(
                sp_size,
                sequence_parallelism_mode,
                sequence_parallel=sequence_parallel,
                context_parallel=context_parallel,
            ),
            ep_size=ep_size,
            zero=sharded,
            ddp=DataParallelConfig() if ddp is None and sharded is None else ddp,
            mesh_order=check_order(mesh_order),
        )
        self.parallel_output, self.unchecked = parallel_output, checked_choice(unchecked)
        self._unchecked_layers: dict[str, str] = {}
        self.custom_policy = custom_policy
        self.example_batch, self.split_batch = example_batch, split_batch
        self.pipeline_record = pipeline_record
        check_used(
            self.config,
            custom_policy=custom_policy,
            example_batch=example_batch,
            split_batch=split_batch,
            pipeline_record=pipeline_record,
        )
        if loss_scale is not None and precision is None:
            msg = "`loss_scale` is about fp16. Pass `precision='fp16'` as well, or a PrecisionPolicy to `Booster`."
            raise ConfigError(msg)
        self.precision = None if precision is None else PrecisionPolicy.parse(precision, loss_scale=loss_scale)
        options = self.config.data_parallel(max_norm)
        given = {each.name: getattr(options, each.name) for each in fields(options)}
        given["stage"] = min(options.stage, 2)  # stage 3 is this plugin's, and reduces gradients as stage 2
        self._zero = LowLevelZeroPlugin(**given, precision=self.precision)

    @classmethod
    def settings_to_plan(cls, world_size: int) -> list[dict[str, Any]]:
        """Return the settings that ``booster plan`` compares."""
        return meshes_to_plan(world_size)

    def offloading(self) -> str | None:
        """Return the option that offloads, if any; ``booster plan`` can't tell device and host memory apart."""
        return self._zero.offloading()

    def resolve_precision(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return the policy with working parameters in the compute format, and fp32 masters where that is narrow.

        Raises:
            ConfigError: If fp32 compute has masters.
        """
        return self._zero.resolve_precision(policy)

    def check_model(self, objects: Boosted, context: BoostContext) -> None:
        """Refuse embeddings that change their table in forward."""
        if context.coordinator.world_size > 1:
            refuse_renormalized(objects.model)

    def shard(self, objects: Boosted, context: BoostContext, values: Recording | None) -> Boosted:
        """Split the model's layers, cut it into stages, and shard what the optimizer updates.

        Raises:
            ConfigError: If the sizes do not divide the world, the model has no policy or
                can't be split, an embedding changes its table, or an optimizer needs whole experts that are spread.

        Collective: every rank of the world.
        """
        del values
        self._warn_of_plain_data_parallelism()
        found = shard(objects, context, self, self._mesh_of_world(), self._zero)
        boosted, self._unchecked_layers = found.boosted, found.unchecked
        model: HybridModel = boosted.model  # type: ignore[assignment]
        if callable(getattr(model.unwrap(), "generate", None)):
            from booster_hybrid.generating import replace_generate

            replace_generate(model, context.device, splits_sequences=self.config.sequence.mode is not None)
        if found.recording is not None:
            model.attach(boosted.optimizers, context)
            adapter = self.state_adapter(model, context)
            shapes = model.local.whole_shapes(objects.model)
            fill_model(objects.model, found.recording, adapter.shards_to_fill(), context, adapter.layout, shapes=shapes)
        return boosted

    def parts_of(self, model: ModelWrapper) -> Container[int]:
        """Return the ``id`` of each parameter that is split over ranks."""
        boosted: HybridModel = model  # type: ignore[assignment]
        return parts_of(model.unwrap(), boosted.local)

    def has_pipeline(self, model: nn.Module) -> bool:
        """Return whether the model is cut into stages."""
        return getattr(boosted_inside(model), "engine", None) is not None

    def without_pipeline(self, world_size: int) -> tuple[HybridParallelPlugin, int] | None:
        """Return a plugin with the same options but no pipeline, and the number of stages, for ``booster plan``.

        Raises:
            ConfigError: If stages do something else than their part of it, or the sizes do not divide the world.
        """
        pipeline = self.config.pipeline
        if pipeline.size == 1:
            return None
        self._shape(world_size)
        if self.config.zero is not None and self.config.zero.stage == 3:
            msg = (
                "`zero_stage=3` of a pipeline can't be planned: a rank gathers all its parameters for each batch. "
                "Plan `zero_stage=2`, which holds as much at the peak."
            )
            raise ConfigError(msg)
        if pipeline.checkpoint_ratio is not None:
            msg = (
                f"`checkpoint_ratio={pipeline.checkpoint_ratio!r}` can't be planned, as it counts layers of stages. "
                "Plan with the model's own activation checkpointing, such as `model.gradient_checkpointing_enable()`."
            )
            raise ConfigError(msg)
        whole = copy.copy(self)
        whole.config = replace(self.config, pipeline=PipelineConfig())
        whole._has_warned = True  # noqa: SLF001 - that it splits nothing is as asked
        return whole, pipeline.size

    def microbatches(self, batch: Any) -> list[Any]:
        """Return the microbatches of a batch."""
        return cut_batch(batch, self.config.pipeline, self.split_batch)[0]

    def pipeline_costs(self, num_microbatches: int) -> tuple[float, float]:
        """Return which part of a step a rank waits for others, and the most microbatches that it keeps activations of.

        A stage's activations are those of a chunk, of which each rank has as many as any other.
        """
        config = self.config.pipeline
        schedule = make_schedule(config.style, config.size, num_microbatches, config.num_chunks)
        most = max(map(schedule.peak_live, range(config.size)))
        return schedule.idle_share(0), most / config.num_chunks

    @contextlib.contextmanager
    def without_values(self) -> Iterator[str | None]:
        """Leave out what only values tell, as ``booster plan`` boosts and trains: layers are not compared.

        Yields:
            What is assumed in their place, in a sentence.
        """
        before, self.unchecked = self.unchecked, "allow"
        try:
            if self.config.ep_size == 1:
                yield None
                return
            from booster_hybrid.expert_parallel.exchange import assuming_balanced_experts

            with assuming_balanced_experts():
                yield "as many tokens choose each expert"
        finally:
            self.unchecked = before

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
            optimizer: The boosted optimizer, any of several; ``None``, or gradients being off, evaluates without
                backward.
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
            data_iter if optimizer is None else show_first_batch(data_iter, model),
            criterion,
            optimizer if torch.is_grad_enabled() else None,
            return_loss=return_loss,
            return_outputs=return_outputs,
        )

    def data_parallel_coordinates(self, coordinator: DistCoordinator) -> tuple[int, int]:
        """Return this rank's index along the data parallel axis, and its size."""
        shape = self._shape(coordinator.world_size)
        return shape.coordinates(coordinator.rank)["dp"], shape.sizes["dp"]

    def state_adapter(self, model: ModelWrapper, context: BoostContext) -> HybridStateAdapter:
        """Return the view of what is split and sharded, in the shapes of the user's own model."""
        del context
        axes = self._mesh_of_world()
        engine = engine_of(model.boosted_optimizers)
        boosted: Any = boosted_inside(model)
        local: LocalModel = boosted.local
        data, alike = axes["dp", "sp"], axes["edp", "sp"]
        held_by = dict.fromkeys(local.expert_splits, Replica(alike.index, alike.size))
        everyone = Replica(data.index, data.size)
        inner = ShardedStateAdapter(model, engine, everyone, held_by, gatherer=boosted.gatherer)
        adapter = HybridStateAdapter(
            inner,
            local.splits,
            is_first=axes["tp",].index == 0,
            stages=boosted.stages,
            stage=local.stage,
        )
        if not local.expert_splits:
            return adapter
        return HybridStateAdapter(adapter, local.expert_splits, is_first=axes["ep",].index == 0, owns_whole=True)

    def no_sync(self, model: ModelWrapper) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate here; from ZeRO 2 on each is reduced into its shard."""
        return self._zero.no_sync(model)

    def parameter_paths(self, model: nn.Module) -> Mapping[str, str]:
        """Return the names of the whole model's parameters, also of those on other stages, and where they are."""
        boosted: Any = boosted_inside(model)
        if boosted.stages is None:
            return super().parameter_paths(model)
        stages: StageMap = boosted.stages
        named = {name: path for name, path in stages.paths.items() if name in stages.parameters}
        return {**{path: path for path in named.values()}, **named}

    def full_gradient(self, model: ModelWrapper, name: str) -> Tensor | None:
        """Return the whole gradient of a parameter, in the shape that it has in the user's model, on every rank.

        Raises:
            ConfigError: If ranks of a pipeline ask for different ones.
        """
        boosted: Any = boosted_inside(model)
        local: LocalModel = boosted.local
        if boosted.stages is not None:
            remedy = "A stage has only some of the parameters: take the names from the model before `boost`."
            DistCoordinator().agree("full_gradient", name, remedy=remedy, process_group=local.pipeline)
        engine = engine_of(model.boosted_optimizers)
        if engine is not None:
            engine.settle()
        whole = None
        owner = 0 if boosted.stages is None else boosted.stages.owner(boosted.stages.name_at(name))
        if local.stage == owner:
            parameter = unwrap_model(model).get_parameter(name)
            whole = self._gradient_here(boosted, parameter)
        return local.from_stage(whole, owner)

    def set_full_gradient(self, model: ModelWrapper, name: str, values: Tensor) -> None:
        """Replace a parameter's gradient on every stage that has it, which `full_gradient` has returned just before.

        Raises:
            ConfigError: On every rank, if the boosted optimizer does not hold the parameter.
        """
        boosted: Any = boosted_inside(model)
        stages: StageMap | None = boosted.stages
        paths = {name}
        if stages is not None:  # a tied tensor may be here under another name
            first = stages.name_at(name)
            paths = {path for each, path in stages.paths.items() if stages.aliases.get(each, each) == first}
        module = unwrap_model(model)
        names = NamedTensors.of(module).name_of
        with DistCoordinator().together("set_full_gradient"):
            for path, parameter in module.named_parameters():
                if path in paths:
                    part = boosted.local.take(names[id(parameter)], values)
                    set_gradient(model.boosted_optimizers, parameter, part, name)

    def _gradient_here(self, model: HybridModel, parameter: nn.Parameter) -> Tensor | None:
        holder = holder_of(model.boosted_optimizers, parameter)
        if holder is not None:
            return holder.full_gradient(parameter)
        own = unscaled_gradient(parameter, model.boosted_optimizers)
        axes, name = self._mesh_of_world(), NamedTensors.of(model.unwrap()).name_of[id(parameter)]
        data = axes["dp", "sp"]
        if not any(collectives.all_gather_object(own is not None, data.group)):
            return None
        whole = torch.zeros_like(parameter) if own is None else own.contiguous()
        alike = axes["edp", "sp"] if name in model.local.expert_splits else data
        collectives.all_reduce(whole, group=alike.group).wait()
        return model.local.put_together(name, whole / data.size)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        return {
            **asdict(self.config),
            "max_norm": self._zero.config.max_norm,
            "parallel_output": self.parallel_output,
            "unchecked": self.unchecked,
            "unchecked_layers": self._unchecked_layers,
            **({"splits": "nothing, as under plugin 'ddp'"} if self._splits_nothing else {}),
        }

    def agreed_options(self) -> Mapping[str, object]:
        """Return what ranks must have alike; layers are not checked yet."""
        options = {**self.describe(), "custom_policy": self.custom_policy}
        del options["unchecked_layers"]
        return options

    def _mesh_of_world(self) -> Mesh:
        """Return this rank's place; process groups are made once for each world."""
        world = dist.group.WORLD
        if self._made_for is None or self._made_for[0] is not world:
            self._made_for = (world, make_groups(self._shape(dist.get_world_size()), self.config.ep_size))
        return self._made_for[1]


_BESIDE_CONFIG = frozenset(
    ("precision", "example_batch", "split_batch", "parallel_output", "unchecked", "custom_policy", "loss_scale")
)
"""Arguments that no `HybridConfig` holds, next to where the pipeline's record goes and the norm of replicated state."""


def _refuse_beside_config(function: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Refuse arguments that `HybridConfig` has, next to one.

    Raises:
        ConfigError: If there is one.
    """
    free = {*_BESIDE_CONFIG, "self", "config", "pipeline_record"}
    if getattr(given["config"], "zero", None) is None:
        free.add("max_norm")
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in free and given[name] != parameter.default:
            msg = (
                f"`{name}={given[name]!r}` is a part of `config=HybridConfig(...)`, which is given too. Say it in one "
                "place."
            )
            raise ConfigError(msg)
