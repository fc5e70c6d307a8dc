from __future__ import annotations

import pytest
import torch
from ranked import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime.sharding.dtensor import DTensorStateAdapter, dtensor_shards
from booster_testing import run_on_ranks

PLACEMENTS = {
    "rows": ((4,), [Shard(0)], (7, 5)),
    "columns": ((4,), [Shard(1)], (7, 6)),
    "fewer rows than ranks": ((4,), [Shard(0)], (2, 3)),
    "replicas of rows": ((2, 2), [Replicate(), Shard(0)], (5, 3)),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)], (5, 3)),
    "rows twice": ((2, 2), [Shard(0), Shard(0)], (7, 3)),
    "whole": ((2, 2), [Replicate(), Replicate()], (3,)),
    "scalar": ((4,), [Replicate()], ()),
}


def owned_parts(name):
    sizes, placements, shape = PLACEMENTS[name]
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    mesh = init_device_mesh("cpu", sizes)
    tensor = distribute_tensor(whole, mesh, placements)
    shards = list(dtensor_shards("w", None, tensor))
    for shard in shards:
        assert torch.equal(shard.data, whole[tuple(slice(*edges) for edges in shard.box)])
    return [shard.data.flatten().tolist() for shard in shards if shard.is_owner]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_owned_parts_cover_a_tensor_once(name):
    numel = torch.Size(PLACEMENTS[name][2]).numel()
    parts = run_on_ranks(owned_parts, 4, name)
    assert sorted(value for of_rank in parts for part in of_rank for value in part) == [float(i) for i in range(numel)]


def strided_rows():
    """Cut by the second axis first and by the first axis within, as `fully_shard` does after tensor parallelism."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Linear(3, 9)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    shards = list(DTensorStateAdapter(model, None, DistCoordinator()).model_shards())
    for shard in shards:
        assert torch.equal(shard.data, whole[shard.name][tuple(slice(*edges) for edges in shard.box)])
    return [(shard.name, *row) for shard in shards if shard.is_owner for row in [range(*shard.box[0])]]


def test_rows_cut_by_two_axes_out_of_order_are_found():
    per_rank = run_on_ranks(strided_rows, 4)
    for name in ("weight", "bias"):
        rows = [row for of_rank in per_rank for held, *chosen in of_rank if held == name for row in chosen]
        assert sorted(rows) == list(range(9))


@on_ranks(2)
def test_values_that_are_still_to_be_summed_are_refused():
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    with pytest.raises(CheckpointError, match=r"'w/sum' is placed as .* so no rank holds its values"):
        list(dtensor_shards("w", "sum", tensor))
