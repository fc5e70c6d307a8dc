"""A boosted container has the items, length and iteration of the user's own, under every plugin."""

import copy

import pytest
import torch
import torch.distributed as dist
from cases import Setting
from plugin_runs import RUNS, boosted, runs
from ranked import on_ranks
from torch import nn

from booster_runtime import full_gradient
from booster_zero import LowLevelZeroPlugin

SETTINGS = {
    **runs("single", "ddp", "fsdp", "gemini"),
    "zero": RUNS["zero1"],
    "zero with overlap": Setting(LowLevelZeroPlugin, {"stage": 2, "overlap_allgather": True}),
    "hybrid": RUNS["hybrid-dp"],
    "hybrid zero3": RUNS["zero3"],
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


class ByName(nn.ModuleDict):
    def forward(self, x):
        return self["second"](self["first"](x))


@pytest.mark.parametrize("run", SETTINGS)
@on_ranks(lambda run: SETTINGS[run].num_ranks)
def test_a_boosted_container_looks_like_the_own_one(run):
    own = make()
    layers = list(own)
    _, model, _ = boosted(SETTINGS[run], own)
    assert len(model) == 3
    assert [model[0], model[1], model[-1]] == layers
    assert list(model) == layers
    assert list(reversed(model)) == layers[::-1]
    assert layers[1] in model
    assert nn.Tanh() not in model
    assert [type(layer) for layer in model[:2]] == [type(layer) for layer in layers[:2]]
    with pytest.raises(IndexError):
        model[3]
    _, model, _ = boosted(SETTINGS[run], ByName({"first": nn.Linear(6, 6), "second": nn.Linear(6, 3)}))
    assert list(model) == ["first", "second"]
    assert "first" in model
    assert "third" not in model
    assert model["second"].out_features == 3
    _, model, _ = boosted(SETTINGS[run], nn.Linear(6, 3))
    assert bool(model) is True
    for ask, match in (
        (len, r"'\w*Linear' has no len"),
        (iter, r"'\w*Linear' object is not iterable"),
        (lambda it: it[0], r"'\w*Linear' object is not subscriptable"),
        (lambda it: 0 in it, r"'\w*Linear' is not iterable"),
    ):
        with pytest.raises(TypeError, match=match):
            ask(model)


@pytest.mark.parametrize("run", [run for run in SETTINGS if run != "fsdp"])  # torch gathers in the forward of units
@on_ranks(lambda run: SETTINGS[run].num_ranks)
def test_gradients_of_a_loop_over_the_layers_are_those_of_one_process(run):
    plain = make()
    booster, model, optimizer = boosted(SETTINGS[run], copy.deepcopy(plain))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    shares = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    plain(torch.cat(shares)).square().mean().backward()
    x = shares[dist.get_rank() if world_size > 1 else 0]
    for layer in model:
        x = layer(x)
    booster.backward(x.square().mean(), optimizer)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(full_gradient(booster, model, name), parameter.grad, msg=name)
