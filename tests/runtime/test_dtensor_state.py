from itertools import chain

import pytest
import torch
from ranked import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime.sharding.dtensor import DTensorStateAdapter, dtensor_shards

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


@pytest.mark.parametrize("name", PLACEMENTS)
@on_ranks(4)
def test_owned_parts_cover_a_tensor_once(name):
    sizes, placements, shape = PLACEMENTS[name]
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shards = list(dtensor_shards("w", None, distribute_tensor(whole, init_device_mesh("cpu", sizes), placements)))
    for shard in shards:
        assert torch.equal(shard.data, whole[tuple(slice(*edges) for edges in shard.box)])
    owned = [value for shard in shards if shard.is_owner for value in shard.data.flatten().tolist()]
    assert sorted(chain(*DistCoordinator().all_gather_object(owned))) == whole.flatten().tolist()


@on_ranks(4)
def test_rows_cut_by_two_axes_out_of_order_are_found():
    """Cut by the second axis first and by the first axis within, as `fully_shard` does after tensor parallelism."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Linear(3, 9)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    coordinator, rows = DistCoordinator(), {"weight": [], "bias": []}
    for shard in DTensorStateAdapter(model, None, coordinator).model_shards():
        assert torch.equal(shard.data, whole[shard.name][tuple(slice(*edges) for edges in shard.box)])
        rows[shard.name] += range(*shard.box[0]) if shard.is_owner else ()
    for of_ranks in map(coordinator.all_gather_object, rows.values()):
        assert sorted(chain(*of_ranks)) == list(range(9))


@on_ranks(2)
def test_values_that_are_still_to_be_summed_are_refused():
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    with pytest.raises(CheckpointError, match=r"'w/sum' is placed as .* so no rank holds its values"):
        list(dtensor_shards("w", "sum", tensor))
