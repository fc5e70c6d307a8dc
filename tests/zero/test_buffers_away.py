"""Buffers that are only in memory while in use: no use goes unannounced, and no bit depends on it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gathering_plugin import GatheringPlugin
from ranked import on_ranks
from restless_memory import RestlessMemory
from torch import nn

from booster_core import Booster
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.training import whole_model
from booster_zero.engine import Memory, Role

STEPS = 3


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),  # keeps state that is not elementwise
}


def boost(optimizer, precision, memory):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    net[2].weight.requires_grad_(requires_grad=False)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    booster = Booster("cpu", precision, GatheringPlugin(memory=memory))
    model, optimizer, *_ = booster.boost(net, OPTIMIZERS[optimizer](trained))
    return booster, model, optimizer


def train(booster, model, optimizer, first=0):
    names = [name for name, _ in model.unwrap().named_parameters()]
    found = {}
    for step in range(first, first + STEPS):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            booster.backward(model(torch.randn(3, 8, generator=generator)).float().square().mean(), optimizer)
        found |= {f"gradient {step} {name}": full_gradient(booster, model, name) for name in names}
        optimizer.step()
        optimizer.zero_grad()
    return found | whole_model(booster, model)


def train_with(optimizer, precision, memory, folder):
    """Train, save, load into another run and train on there; return what there is of both."""
    run = boost(optimizer, precision, memory)
    found = train(*run)
    booster, model, boosted = run
    booster.save_model(model, f"{folder}/{memory.__name__}/model", shard=True)
    booster.save_optimizer(boosted, f"{folder}/{memory.__name__}/optimizer", shard=True)
    other = boost(optimizer, precision, memory)
    booster, model, boosted = other
    booster.load_model(model, f"{folder}/{memory.__name__}/model")
    booster.load_optimizer(boosted, f"{folder}/{memory.__name__}/optimizer")
    found |= {f"later {name}": tensor for name, tensor in train(*other, STEPS).items()}
    if memory is RestlessMemory:
        for _, boosted, _ in (run, other):
            faults = boosted.gatherer.memory.faults
            assert not faults, faults
            assert boosted.gatherer.memory.roles() == {Role.PARAM, Role.GRAD, Role.OPTIM}
    return found


@pytest.mark.parametrize(("optimizer", "precision"), [("sgd", None), ("adamw", "bf16"), ("adafactor", None)])
def test_bits_do_not_depend_on_where_blocks_are_between_uses(optimizer, precision, tmp_path):
    expected = run_on_ranks(train_with, 2, optimizer, precision, Memory, str(tmp_path))
    for found, told in zip(
        run_on_ranks(train_with, 2, optimizer, precision, RestlessMemory, str(tmp_path)), expected, strict=True
    ):
        assert found.keys() == told.keys()
        assert [
            name for name, tensor in told.items() if tensor is not None and not torch.equal(found[name], tensor)
        ] == []


@on_ranks(2)
def test_a_run_without_masters_takes_those_of_a_file_as_its_parameters(tmp_path):
    """Save a run with masters, and return this rank's parts of these, and the parameters of a run without masters."""
    folder = str(tmp_path)
    booster, model, optimizer = boost("adamw", "bf16", Memory)
    train(booster, model, optimizer)
    booster.save_model(model, f"{folder}/model", shard=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
    every = booster.state_adapter(model, optimizer).optimizer_shards()
    masters = [(shard.name, shard.flat_range, shard.data.clone()) for shard in every if shard.state == "master"]
    booster, model, optimizer = boost("adamw", None, Memory)
    booster.load_model(model, f"{folder}/model")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    parameters = whole_model(booster, model)
    assert masters
    for name, (start, stop), master in masters:
        assert torch.equal(parameters[name].flatten()[start:stop], master.flatten()), name
    assert any(not torch.equal(master.bfloat16().float(), master) for _, _, master in masters)
