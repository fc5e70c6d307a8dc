"""`GeminiPlugin`: ZeRO-3 in chunks behind `Booster`; wires the parts of this package together."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from booster_core.plugin import Boosted, GradientScaling, like
from booster_gemini.config import GeminiConfig, find_leaves
from booster_gemini.engine import GeminiEngine, make_memory, max_ahead_bytes, most_chunk_numel
from booster_runtime.sharding import (
    check_distinct_memory,
    layers_of,
    note_reductions,
    raised_on_all,
    refuse_all_gradients,
    refuse_renormalized,
)
from booster_runtime.strategy import OF_LOSS_SCALE, OF_MODEL, OF_PRECISION, config_of
from booster_zero import ShardedModel, ShardedOptimizer, ShardedStateAdapter, fill_model
from booster_zero.engine import Gatherer, ListedParameters, engine_of, keeping_gradients
from booster_zero.gathering import check_modules
from booster_zero.plugin import BucketStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import nn

    from booster_core.plugin import BoostContext, ModelWrapper
    from booster_core.precision import PrecisionPolicy
    from booster_core.state import StateAdapter
    from booster_runtime.lazy import Recording
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine import Format


_REMEDY = (
    "If the data chooses which modules run, such as experts, pass the module around them to the plugin: "
    "`GeminiPlugin(leaf_modules=[...])`."
)

_MOST_TIMES = 4
"""How many times the smallest chunk one may be that holds a layer."""
_OF_LAYERS = "use `HybridParallelPlugin` to split layers and sequences; the model chooses its attention and kernels"


class GeminiPlugin(BucketStrategy):
    """Data parallelism whose parameters, gradients and optimizer state are in chunks, split over the ranks.

    `GeminiConfig` documents the keywords of the signature, and `ShardingOptions` those that it shares with ZeRO.

    Args:
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Memory per rank, for N ranks: 1/N of parameters, gradients, optimizer state and masters; the chunks in use.
    Communication per rank and step: two all-gathers of the parameters and one reduce-scatter of the gradients.
    Reference: Fang et al. 2022, "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management"
    (arXiv:2108.05818).
    """

    config: GeminiConfig
    name: ClassVar[str] = "gemini"
    api_version: ClassVar[int] = 2
    renamed_arguments: ClassVar[Mapping[str, str]] = {
        **OF_LOSS_SCALE,
        **OF_PRECISION,
        **dict.fromkeys(
            ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio"),
            "pass `placement_policy='auto'` with `memory_budget_bytes=`, what activations leave of the device",
        ),
        **dict.fromkeys(
            ("chunk_config_dict", "search_range_m", "hidden_dim", "min_chunk_size_m"),
            "pass `min_chunk_bytes=`, at which a chunk takes no further parameter",
        ),
        **dict.fromkeys(
            ("chunk_init_device", "memstats", "strict_ddp_mode"),
            "leave it out: the placement and the recorded first step say so",
        ),
        **dict.fromkeys((*OF_MODEL, "tp_size", "enable_tensor_parallelism", "enable_sequence_parallelism"), _OF_LAYERS),
        "enable_async_reduce": "pass `overlap_communication=`",
        "enable_gradient_accumulation": "leave it out: `booster.no_sync` always works",
        "force_outputs_fp32": "pass `precision=PrecisionPolicy(output_dtype=torch.float32)`",
        "extra_dp_size": "pass `replica_size=`",
    }

    def __init__(
        self,
        *,
        placement_policy: str = "static",
        offload_param_frac: float = 0.0,
        offload_optim_frac: float = 0.0,
        memory_budget_bytes: int | None = None,
        offload_dir: str | Path | None = None,
        pin_memory: bool = True,
        shard_param_frac: float = 1.0,
        min_chunk_bytes: int = 16 * 2**20,
        max_prefetch: int = 1,
        leaf_modules: Sequence[str | type[nn.Module]] = (),
        max_norm: float = 0.0,
        overlap_communication: bool = True,
        communication_dtype: torch.dtype | str | None = None,
        master_weights: bool = True,
        replica_size: int = 1,
        partition: str = "auto",
        unused: str = "zero",
        broadcast_buffers: bool = True,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        super().__init__(config_of(GeminiConfig, locals()), precision)

    @classmethod
    def settings_to_plan(cls, world_size: int) -> list[dict[str, Any]]:
        """Return the settings that ``booster plan`` compares."""
        del world_size
        return [{}, {"shard_param_frac": 0.0}]

    def offloading(self) -> str | None:
        """Return the option that offloads, if any; ``booster plan`` can't tell device and host memory apart."""
        config = self.config
        if config.placement_policy != "static":
            return f"placement_policy={config.placement_policy!r}"
        moved = {name: getattr(config, name) for name in ("offload_param_frac", "offload_optim_frac")}
        return ", ".join(f"{name}={value}" for name, value in moved.items() if value) or None

    def check_model(self, objects: Boosted, context: BoostContext) -> None:
        """Refuse parameters that share memory, scripted modules, embeddings that change their table, unknown leaves."""
        del context
        refuse_renormalized(objects.model)
        check_distinct_memory(objects.model)
        check_modules(objects.model)
        find_leaves(objects.model, self.config.leaf_modules)

    def shard(self, objects: Boosted, context: BoostContext, values: Recording | None) -> Boosted:
        """Lay all parameters out in chunks, and let the optimizer update this rank's slices of them.

        Raises:
            ConfigError: If ``replica_size`` does not divide the number of ranks, or the optimizer or a parameter can't
                be sharded.

        Collective: every rank of the world.
        """
        model, given = objects.model, objects.optimizers
        leaves = find_leaves(model, self.config.leaf_modules)
        ranks = self._ranks.get(gathers_apart=bool(leaves))
        hollow = {} if values is None else values.name_of
        lazy = {index for index, parameter in enumerate(model.parameters()) if id(parameter) in hollow}
        listed = ListedParameters(given, self.config.partition)
        format_of = self.config.formats(model, context.precision, context.device, listed=listed, lays_out_all=True)
        gatherer = Gatherer(
            model,
            ranks,
            memory=make_memory(self.config, context),
            bucket_bytes=self._chunk_bytes(model, ranks, format_of),
        )
        gatherer.shard_all(
            format_of,
            max_prefetch=self.config.max_prefetch,
            max_ahead_bytes=max_ahead_bytes(self.config),
            release_fraction=self.config.shard_param_frac,
            lazy=lazy,
            remedy=_REMEDY,
        )
        engine, optimizers = None, []
        if given:
            engine = GeminiEngine(
                model,
                given,
                chosen={
                    gatherer.layout.index_of[id(parameter)]
                    for inside in leaves.values()
                    for leaf in inside
                    for parameter in leaf.parameters()
                },
                config=self.config,
                listed=listed,
                gatherer=gatherer,
                format_of=format_of,
                device=context.device,
            )
            scaling = GradientScaling(context.precision)
            optimizers = [
                ShardedOptimizer(engine, number, offloads=gatherer.memory.moves, context=context, scaling=scaling)
                for number in range(len(given))
            ]
            trained = [chunk.format.wire for chunk in gatherer.layout.buckets if chunk.format.is_trained]
            note_reductions(model, trained, context.device)
        else:
            refuse_all_gradients(model)
        adapter = ShardedStateAdapter(model, engine, context.coordinator, gatherer=gatherer)
        if values is not None:
            fill_model(model, values, adapter.shards_to_fill(), context, gatherer.layout)
        with raised_on_all("boost", context.device):
            if problem := gatherer.memory.problem():
                raise problem
        gathered = {
            module: [parameter for leaf in inside for parameter in leaf.parameters()]
            for module, inside in leaves.items()
        }
        wrapped = ShardedModel(model, precision=context.precision, sharded=engine, gatherer=gatherer)
        wrapped.gather_on_use(gathered)
        return objects._replace(model=wrapped, optimizer=like(objects.optimizer, optimizers))

    def state_adapter(self, model: ModelWrapper, context: BoostContext) -> StateAdapter:
        """Return the view of this rank's slices of parameters, masters and optimizer state."""
        assert isinstance(model, ShardedModel), "Booster passes what `configure` returned"
        engine = engine_of(model.boosted_optimizers)
        return ShardedStateAdapter(model, engine, context.coordinator, gatherer=model.gatherer)

    def no_sync(self, model: ModelWrapper) -> AbstractContextManager[None]:
        """Return a context in which gradients are reduced into chunks; the last backward averages over replicas."""
        return keeping_gradients(model.boosted_optimizer, in_shards=True)

    def describe(self) -> Mapping[str, object]:
        """Return the options and their values."""
        names = [each if isinstance(each, str) else each.__qualname__ for each in self.config.leaf_modules]
        return {**asdict(self.config), "leaf_modules": names}

    def agreed_options(self) -> Mapping[str, object]:
        """Return what ranks must have alike: all options but the folder, which may be another on each host."""
        return {**self.describe(), "offload_dir": self.config.offload_dir is not None}

    def _chunk_bytes(self, model: nn.Module, ranks: ShardingRanks, format_of: Callable[[nn.Parameter], Format]) -> int:
        formats = {format_of(parameter) for parameter in model.parameters()}
        itemsize = min((format_.wire.itemsize for format_ in formats), default=4)
        most = most_chunk_numel(self.config, formats, ranks.shard_size)
        least = self.config.min_chunk_bytes
        layers = (sum(each.numel() for each in layer.parameters()) for layer in layers_of(model).values())
        largest = itemsize * max(layers, default=0)
        size = largest if least < largest <= _MOST_TIMES * least else least
        return size if most is None else min(size, itemsize * most)
