"""``torch.distributed.checkpoint.state_dict`` on what `boost` returns."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranked import on_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.tensor import DTensor

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import TinyMixedBag
from booster_testing.training import whole_model

OPTIONS = {
    "one unit": {},
    "units": {"unit_min_numel": 32},
    "replicated too": {"ignored_parameters": ["norm.weight"]},
}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
}


def make(kind):
    torch.manual_seed(0)
    model = TinyMixedBag(unused=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    halves = [{"params": trained[:2]}, {"params": trained[2:], "lr": 0.02}]
    return model, OPTIMIZERS[kind](halves)


def boost(options, kind):
    booster = Booster("cpu", plugin=TorchFSDPPlugin(**OPTIONS[options]))
    model, optimizer, *_ = booster.boost(*make(kind))
    return booster, model, optimizer


def train(model, optimizer, backward, steps, rank=0, world_size=1):
    for step in steps:
        tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step))
        backward(model(tokens[rank::world_size]).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def train_boosted(model, optimizer, steps):
    train(model, optimizer, optimizer.backward, steps, dist.get_rank(), dist.get_world_size())


def plainly(kind, steps):
    model, optimizer = make(kind)
    train(model, optimizer, lambda loss: loss.backward(), steps)
    return model, optimizer


FULL = of_torch.StateDictOptions(full_state_dict=True)


@pytest.mark.parametrize(
    ("options", "kind"), [("one unit", "adamw"), ("units", "momentum"), ("replicated too", "fused"), ("units", "rprop")]
)
@on_ranks(2)
def test_whole_states_equal_one_process(options, kind):
    _, model, optimizer = boost(options, kind)
    train_boosted(model, optimizer, range(2))
    with torch.no_grad():
        model(torch.zeros(1, 6, dtype=torch.long))
    plain, plain_optimizer = plainly(kind, range(2))
    parameters = of_torch.get_model_state_dict(model, options=FULL)
    assert_same_tensors(parameters, of_torch.get_model_state_dict(plain), tolerance_for(torch.float32))
    sharded = of_torch.get_optimizer_state_dict(model, optimizer)
    whole = of_torch.get_optimizer_state_dict(model, optimizer, options=FULL)
    expected = of_torch.get_optimizer_state_dict(plain, plain_optimizer)
    listed, expected_listed = ([group["params"] for group in each["param_groups"]] for each in (whole, expected))
    assert listed == expected_listed
    assert whole["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert_same_tensors({key: whole["state"][name][key] for key in tensors}, tensors, tolerance_for(torch.float32))
        is_replicated = options == "replicated too" and name == "norm.weight"
        in_shards = {key for key, value in sharded["state"][name].items() if isinstance(value, DTensor)}
        assert in_shards == (set() if is_replicated else {key for key in tensors if key != "step"})


def saves(options, kind, folder):
    _, model, optimizer = boost(options, kind)
    train_boosted(model, optimizer, range(2))
    model_state, optimizer_state = of_torch.get_state_dict(model, optimizer)
    # torch 2.10 warns of its own code.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train_boosted(model, optimizer, range(2, 4))


def loads(options, kind, folder):
    booster, model, optimizer = boost(options, kind)
    model_state, optimizer_state = of_torch.get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    of_torch.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train_boosted(model, optimizer, range(2, 4))
    return whole_model(booster, model)


@pytest.mark.parametrize(("options", "kind"), [("units", "adamw"), ("replicated too", "adamw")])
def test_torch_s_checkpoint_goes_on_at_another_world_size(options, kind, tmp_path):
    run_on_ranks(saves, 2, options, kind, str(tmp_path))
    expected, _ = plainly(kind, range(4))
    for parameters in run_on_ranks(loads, 4, options, kind, str(tmp_path)):
        assert_same_tensors(parameters, expected.state_dict(), tolerance_for(torch.float32))


@on_ranks(2)
def test_whole_states_of_one_process_load():
    booster, model, optimizer = boost("units", "adamw")
    plain, plain_optimizer = plainly("adamw", range(2))
    of_torch.set_model_state_dict(model, of_torch.get_model_state_dict(plain), options=FULL)
    of_torch.set_optimizer_state_dict(
        model, optimizer, of_torch.get_optimizer_state_dict(plain, plain_optimizer), options=FULL
    )
    train_boosted(model, optimizer, range(2, 4))
    expected, _ = plainly("adamw", range(4))
    assert_same_tensors(whole_model(booster, model), expected.state_dict(), tolerance_for(torch.float32))


# ---- the optimizer's own groups and state


@on_ranks(2)
def test_groups_list_the_parameters_and_state_is_sharded_as_they_are():
    booster = Booster("cpu", plugin=TorchFSDPPlugin(ignored_parameters=["0.bias"]))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    booster.backward(model(torch.ones(2, 6)).square().mean(), optimizer)
    optimizer.step()
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(a is b for a, b in zip(listed, model.parameters(), strict=True))
    for name, parameter in model.named_parameters():
        average = optimizer.state[parameter]["exp_avg"]
        assert average.shape == parameter.shape
        assert isinstance(average, DTensor) == isinstance(parameter, DTensor) == (name != "0.bias")
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.abs().sum() for parameter in model.parameters())
