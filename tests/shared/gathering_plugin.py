"""`GatheringPlugin`: the least that `booster_zero.gathering` needs to train, for tests of that package alone."""

from dataclasses import replace

import torch

from booster_core.plugin import Capability, place_model, unwrap_model
from booster_core.precision import PrecisionPolicy
from booster_runtime.sharding import RanksOfWorld, agree_on_values
from booster_runtime.strategy import STRATEGY_TRAINING, Strategy
from booster_zero import ShardedModel, ShardedStateAdapter
from booster_zero.engine import (
    Gatherer,
    ListedParameters,
    Memory,
    ShardedEngine,
    ShardedOptimizer,
    ShardingOptions,
    engine_of,
)
from booster_zero.gathering import check_modules

REMEDY = "Let every rank run the same modules, or pass `leaf_class`."


class GatheringPlugin(Strategy):
    """ZeRO-3 in chunks.

    Args:
        chunk_bytes: As for `Gatherer`, like the next three.
        max_prefetch: The same.
        max_ahead_bytes: The same.
        release_fraction: The same.
        leaf_class: A class of modules whose parameters are gathered as one.
        memory: A class of memories, as for `Gatherer`.
        offload: Step on the host, as `ZeroConfig` says.
        partition: As for `ShardingOptions`.
        replica_size: As for `ShardingOptions`.
        precision: As for `Booster`.
    """

    name = "gathering"
    api_version = 2
    capabilities = STRATEGY_TRAINING | {Capability.DATA_PARALLEL}

    def __init__(
        self,
        *,
        chunk_bytes=256,
        max_prefetch=1,
        max_ahead_bytes=None,
        release_fraction=1.0,
        leaf_class=None,
        memory=Memory,
        offload=False,
        partition="auto",
        replica_size=1,
        precision=None,
    ):
        self.config = ShardingOptions(partition=partition, replica_size=replica_size)
        self.precision = None if precision is None else PrecisionPolicy.parse(precision)
        self.chunks = {
            "chunk_bytes": chunk_bytes,
            "max_prefetch": max_prefetch,
            "max_ahead_bytes": max_ahead_bytes,
            "release_fraction": release_fraction,
        }
        self.leaf_class, self.memory = leaf_class, memory
        self.step_device = torch.device("cpu") if offload else None
        self._ranks = RanksOfWorld(replica_size)

    def resolve_precision(self, policy):
        return self.config.resolve_precision(policy, self.name)

    def shard(self, objects, context, values):
        model, given = objects.model, objects.optimizers
        check_modules(model)
        place_model(model, given, context.device, replace(context.precision, param_dtype=None))
        agree_on_values(model)
        leaves = {}
        if self.leaf_class is not None:
            leaves = {each: [*each.parameters()] for each in model.modules() if isinstance(each, self.leaf_class)}
        listed = ListedParameters(given, self.config.partition)
        format_of = self.config.formats(
            model,
            context.precision,
            context.device,
            listed=listed,
            lays_out_all=True,
            step_device=self.step_device,
        )
        options = dict(self.chunks)
        gatherer = Gatherer(
            model,
            self._ranks.get(gathers_apart=bool(leaves)),
            memory=self.memory(),
            bucket_bytes=options.pop("chunk_bytes"),
        )
        gatherer.shard_all(format_of, remedy=REMEDY, **options)
        engine = optimizer = None
        if given:
            engine = ShardedEngine(
                model,
                given,
                config=self.config,
                listed=listed,
                gatherer=gatherer,
                format_of=format_of,
                device=context.device,
            )
            optimizer = ShardedOptimizer(
                engine, offloads=gatherer.memory.moves or self.step_device is not None, context=context
            )
            # A rank that waited for reductions would not gather what others wait for, before they start theirs.
            engine.reducer.waits_in_backward = not leaves
        wrapped = ShardedModel(model, precision=context.precision, sharded=engine, gatherer=gatherer)
        wrapped.gather_on_use(leaves, on_passed=None if engine is None else engine.reducer.leave_out)
        return objects._replace(model=wrapped, optimizer=optimizer)

    def state_adapter(self, model, context):
        engine = engine_of(model.boosted_optimizers)
        return ShardedStateAdapter(model, engine, context.coordinator, gatherer=model.gatherer)

    def full_gradient(self, model, name):
        optimizer = model.boosted_optimizer
        return None if optimizer is None else optimizer.full_gradient(unwrap_model(model).get_parameter(name))

    def describe(self):
        return {**self.chunks, "leaf_class": self.leaf_class}
