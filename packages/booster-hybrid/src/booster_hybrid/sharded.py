"""ZeRO-3 as the data axis: parameters are sharded over the data parallel ranks, and gathered while they are used.

That is once the model's layers are split and cut into stages. Those of a layer are gathered together, and so are those
outside of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from booster_core.plugin import GradientScaling, like
from booster_runtime.sharding import layers_of, parameters_by_unit, refuse_all_gradients, without_split_ties
from booster_zero.engine import Gatherer, ListedParameters, Memory, default_bucket_bytes
from booster_zero.gathering import check_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from torch import nn

    from booster_core.plugin import BoostContext, Boosted
    from booster_hybrid.model import HybridModel
    from booster_hybrid.optimizer import HybridEngine, HybridOptimizer
    from booster_runtime.sharding import ShardingRanks
    from booster_zero import ZeroConfig


@dataclass(frozen=True)
class Units:
    """What is gathered together.

    Args:
        layers: The parameters of each layer, gathered with its forward and its backward.
        rest: The other parameters, gathered during the forward of the whole model.
        order: All parameters by number, in the lists that share no chunk with each other; what is used first comes
            first, so that it is reduced last.
    """

    layers: Mapping[nn.Module, list[nn.Parameter]] = field(repr=False)
    rest: list[nn.Parameter] = field(repr=False)
    order: list[list[int]] = field(repr=False)


def find_units(model: nn.Module, copies: Mapping[int, tuple[int, ...]]) -> Units:
    """Return the units of a model, of which this rank may hold some layers.

    Args:
        model: The user's model.
        copies: For parameters that several stages of a pipeline hold, by ``id``, which ones they are. All stages lay
            these out in the same way.
    """
    chosen = layers_of(model)
    kept = without_split_ties(model, {id(module) for module in chosen.values()})
    names = [name for name, module in chosen.items() if id(module) in kept]
    by_unit = parameters_by_unit(model, names)
    index_of = {id(parameter): index for index, parameter in enumerate(model.parameters())}

    def numbers(parameters: list[nn.Parameter]) -> list[int]:
        return [index_of[id(parameter)] for parameter in parameters if id(parameter) not in copies]

    shared = [
        [index for key, index in index_of.items() if copies.get(key) == stages] for stages in sorted({*copies.values()})
    ]
    order = [*shared, numbers(by_unit[""]), *(numbers(by_unit[name]) for name in names)]
    return Units(
        layers={chosen[name]: by_unit[name] for name in names},
        rest=by_unit[""],
        order=[unit for unit in order if unit],
    )


_REMEDY = (
    "Run the same modules on every rank, or use `zero_stage=2`, under which each rank keeps its layers' parameters."
)


def shard_parameters(
    objects: Boosted,
    context: BoostContext,
    config: ZeroConfig,
    ranks: ShardingRanks,
    *,
    engine_class: Callable[..., HybridEngine],
    optimizer_class: Callable[..., HybridOptimizer],
    model_class: Callable[..., HybridModel],
    copies: Mapping[int, tuple[int, ...]],
    ranks_of: Mapping[int, ShardingRanks],
    without_values: Container[int],
    is_pipeline: bool,
) -> Boosted:
    """Shard the parameters of a model that is on its device, over ranks that were given the same values of it.

    Args:
        objects: As for `HybridParallelPlugin.configure`.
        context: The same.
        config: Options.
        ranks: The ranks that share a parameter.
        engine_class: What keeps the shards.
        optimizer_class: What steps them.
        model_class: What runs the model.
        copies: For parameters that several stages of a pipeline hold, by ``id``: `Format.copies`.
        ranks_of: For parameters that others share than ``ranks``, by ``id``.
        without_values: The ``id`` of parameters of a lazy model, which get their values later.
        is_pipeline: Whether the model is cut into stages. Parameters are gathered once for each batch then, by
            `ShardedModel.whole_parameters`: data parallel ranks may have different numbers of microbatches.

    Raises:
        ConfigError: If the optimizer or a parameter can't be sharded, or a module is scripted.

    Collective: every rank of the world.
    """
    model = objects.model
    check_modules(model)
    given = objects.optimizers
    listed = ListedParameters(given, config.partition)
    host = torch.device("cpu") if config.offload else None
    format_of = config.formats(
        model,
        context.precision,
        context.device,
        listed=listed,
        lays_out_all=True,
        step_device=host,
        copies=copies,
        ranks=ranks_of,
    )
    units = find_units(model, copies)
    gradient_bytes = sum(parameter.numel() * format_of(parameter).wire.itemsize for parameter in model.parameters())
    bucket_bytes = config.bucket_bytes or default_bucket_bytes(gradient_bytes, ranks.shard_size, stage=config.stage)
    gatherer = Gatherer(model, ranks, memory=Memory(), bucket_bytes=bucket_bytes)
    gatherer.shard_all(
        format_of,
        max_prefetch=1,
        lazy=frozenset(index for index, each in enumerate(model.parameters()) if id(each) in without_values),
        units=units.order,
        remedy=_REMEDY,
    )
    engine, optimizers = None, []
    if given:
        engine = engine_class(
            model,
            given,
            config=config,
            listed=listed,
            gatherer=gatherer,
            format_of=format_of,
            device=context.device,
        )
        scaling = GradientScaling(context.precision)
        optimizers = [
            optimizer_class(engine, number, offloads=host is not None, context=context, scaling=scaling)
            for number in range(len(given))
        ]
    else:
        refuse_all_gradients(model)
    wrapped = model_class(model, precision=context.precision, sharded=engine, gatherer=gatherer)
    if not is_pipeline:
        wrapped.gather_on_use(
            units.layers,
            with_model=units.rest,
            on_passed=None if engine is None else engine.reducer.leave_out,
        )
    return objects._replace(model=wrapped, optimizer=like(objects.optimizer, optimizers))
