"""What every strategy that splits state over ranks needs: who shares a replica, and what an optimizer lets one cut."""

from __future__ import annotations

from booster_core.plugin import normalisation_parameters
from booster_core.state import frozen_base
from booster_runtime.model_methods import generate_together, generating_model
from booster_runtime.muon import update_cost
from booster_runtime.sharding.checks import (
    check_distinct_memory,
    not_optimized,
    raise_for_unused,
    refuse_all_gradients,
    refuse_composed,
    refuse_gradient,
    refuse_renormalized,
    watch_gradient_hooks,
    without_optimizer,
)
from booster_runtime.sharding.dtensor import (
    DTensorStateAdapter,
    dtensor_of,
    dtensor_shards,
    local_of,
    sharded_like,
)
from booster_runtime.sharding.elementwise import (
    OF_TORCH,
    CouplingCheck,
    is_by_matrix,
    keeps_blocks,
    may_couple,
    partition_for,
    step_cost,
)
from booster_runtime.sharding.formats import describe_reductions, note_compute, note_reductions, working_dtypes
from booster_runtime.sharding.hosting import (
    HostedOptimizer,
    ParameterPiece,
    State,
    is_cut,
    numbers_of_group,
    piece_meta,
    piece_shard,
    taken_for,
    whole_shard,
)
from booster_runtime.sharding.layers import (
    CONTAINERS,
    LAYER_NUMEL,
    layers_of,
    modules_by_size,
    parameters_by_unit,
    parametrized_in_forward,
    without_split_ties,
)
from booster_runtime.sharding.ranks import (
    AnyRankFlags,
    BufferWatch,
    RanksOfWorld,
    ShardingRanks,
    agree_on_values,
    control_device,
    make_ranks,
    raised_on_all,
    send_first,
    sharding_groups,
)
from booster_runtime.torch_private import check_names

__all__ = [
    "CONTAINERS",
    "LAYER_NUMEL",
    "OF_TORCH",
    "AnyRankFlags",
    "BufferWatch",
    "CouplingCheck",
    "DTensorStateAdapter",
    "HostedOptimizer",
    "ParameterPiece",
    "RanksOfWorld",
    "ShardingRanks",
    "State",
    "agree_on_values",
    "check_distinct_memory",
    "check_names",
    "control_device",
    "describe_reductions",
    "dtensor_of",
    "dtensor_shards",
    "frozen_base",
    "generate_together",
    "generating_model",
    "is_by_matrix",
    "is_cut",
    "keeps_blocks",
    "layers_of",
    "local_of",
    "make_ranks",
    "may_couple",
    "modules_by_size",
    "normalisation_parameters",
    "not_optimized",
    "note_compute",
    "note_reductions",
    "numbers_of_group",
    "parameters_by_unit",
    "parametrized_in_forward",
    "partition_for",
    "piece_meta",
    "piece_shard",
    "raise_for_unused",
    "raised_on_all",
    "refuse_all_gradients",
    "refuse_composed",
    "refuse_gradient",
    "refuse_renormalized",
    "send_first",
    "sharded_like",
    "sharding_groups",
    "step_cost",
    "taken_for",
    "update_cost",
    "watch_gradient_hooks",
    "whole_shard",
    "without_optimizer",
    "without_split_ties",
    "working_dtypes",
]
