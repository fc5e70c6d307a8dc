"""A model that another library has distributed over the ranks is refused, under every plugin and on every rank."""

import pytest
import torch
from matrix import matrix, named
from named_plugins import NAMES, make_model, plugin_named
from ranked import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_testing import expect_on_ranks
from booster_testing.models import TinyMLP

PLUGINS = [name for name in NAMES if name != "single"]
ALREADY = r"distributed over ranks already: '{}' is a DTensor, .*without `distributed_config`.*plugin: 'fsdp'"


def boost(name, model):
    Booster("cpu", plugin=plugin_named(name)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
def test_what_torch_has_distributed_is_refused(tmp_path):
    parallel, sharded, on_one = TinyMLP(), TinyMLP(), TinyMLP()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    parallelize_module(parallel, mesh, {"first": ColwiseParallel()})
    fully_shard(sharded, mesh=mesh)
    split = nn.Parameter(distribute_tensor(on_one.first.weight, mesh, [Shard(0)]))
    if DistCoordinator().rank == 0:  # the other raises as well, although its model is whole
        on_one.first.weight = split
    for model in (parallel, sharded, on_one):
        with pytest.raises(ConfigError, match=ALREADY.format(r"first\.weight")):
            boost("fsdp", model)


def loaded(name, folder, sizes):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    coordinator = DistCoordinator()
    if coordinator.is_master():
        make_model().save_pretrained(folder)
    coordinator.block_all()
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    boost(name, model)


WAYS = [{"tp_size": 2}, {"tp_size": 2, "tp_plan": "auto"}, {"fsdp_size": 2}, {"pp_size": 2}]


@matrix(
    [f"{name}-{WAYS[0]}" for name in PLUGINS] + [f"fsdp-{way}" for way in WAYS[1:]],
    name=PLUGINS,
    sizes=named(WAYS, str),
)
def test_what_transformers_has_distributed_is_refused(name, sizes, tmp_path):
    pytest.importorskip("transformers", "5.20", reason="earlier ones have another configuration")
    what = (
        r"already: (transformers has given|'model\.embed_tokens\.weight' is a DTensor).*`distributed_config`.*`tp_plan`"
    )
    expect_on_ranks(ConfigError, what, loaded, 2, name, tmp_path / "model", sizes)
