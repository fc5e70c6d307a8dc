"""Models that no plugin trains rightly are refused at `boost`, on every rank."""

import contextlib
from functools import partial

import pytest
import torch
from matrix import matrix
from named_plugins import NAMES, make_model, plugin_named
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_runtime.lazy import LazyInitContext
from booster_testing import expect_on_ranks


def over_one_memory(context):
    """Return a model of which two parameters are tied by their memory alone, of which one is frozen."""
    with context():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight = nn.Parameter(net[0].weight.data, requires_grad=False)
    return net


def renormalized(kind):
    """Return a model that changes parameters in forward."""
    return nn.Sequential(kind(10, 8, max_norm=1.0), nn.Linear(8, 8))


def split_by_hand():
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight, init_device_mesh("cpu", (2,)), [Shard(0)]))
    return net


def split_on_the_first_rank():
    """Return a model that the other rank refuses as well, although it has a whole one."""
    split = split_by_hand()
    return nn.Sequential(nn.Linear(4, 4)) if DistCoordinator().rank else split


def sharded_by_torch():
    return fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=init_device_mesh("cpu", (2,)))


ALIASED = "'0.weight' and '1.weight' are two objects over the same memory"
RENORMALIZED = "Embedding '0' has `max_norm=1`"
DTENSOR = r"distributed over ranks already: '0\.weight' is a DTensor, .*without `distributed_config`.*plugin: 'fsdp'"
PLUGINS = ["ddp", "fsdp", "zero", "gemini", "hybrid"]
MODELS = {
    "eager": (partial(over_one_memory, contextlib.nullcontext), ALIASED, PLUGINS[1:]),
    "lazy": (partial(over_one_memory, LazyInitContext), ALIASED, PLUGINS[1:]),
    "Embedding": (partial(renormalized, nn.Embedding), RENORMALIZED, PLUGINS),
    "EmbeddingBag": (partial(renormalized, nn.EmbeddingBag), RENORMALIZED, PLUGINS),
    "DTensor": (split_by_hand, DTENSOR, NAMES[1:]),
    "DTensor on a rank": (split_on_the_first_rank, DTENSOR, ["fsdp"]),
    "fully_shard": (sharded_by_torch, DTENSOR, ["fsdp"]),
}


def boost(make, name):
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    Booster("cpu", plugin=plugin_named(name)).boost(model, torch.optim.SGD(trained, lr=0.1))


@matrix(
    ["eager-zero", "Embedding-ddp", "EmbeddingBag-gemini", "DTensor on a rank-fsdp", "fully_shard-fsdp"]
    + [f"DTensor-{name}" for name in NAMES[1:]],
    **{"what, name": [(what, name) for what, (_, _, names) in MODELS.items() for name in names]},
)
def test_a_model_is_refused_at_boost(what, name):
    make, message, _ = MODELS[what]
    expect_on_ranks(ConfigError, message, boost, 2, make, name)


def loaded(folder, sizes):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    coordinator = DistCoordinator()
    if coordinator.is_master():
        make_model().save_pretrained(folder)
    coordinator.block_all()
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))


@pytest.mark.parametrize(
    "sizes", [{"tp_size": 2}, {"tp_size": 2, "tp_plan": "auto"}, {"fsdp_size": 2}, {"pp_size": 2}], ids=str
)
def test_what_transformers_has_distributed_is_refused(sizes, tmp_path):
    pytest.importorskip("transformers", "5.20", reason="earlier ones have another configuration")
    what = (
        r"already: (transformers has given|'model\.embed_tokens\.weight' is a DTensor).*`distributed_config`.*`tp_plan`"
    )
    expect_on_ranks(ConfigError, what, boost, 2, partial(loaded, tmp_path / "model", sizes), "fsdp")
