"""A boosted container has the items, length and iteration of the user's own, under every plugin."""

from functools import reduce

import pytest
import torch
from cases import Case, Setting, noise
from driven_runs import assert_same_loop
from plugin_runs import RUNS, boosted, runs
from ranked import on_ranks
from torch import nn

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

    class ByName(nn.ModuleDict):
        def forward(self, x):
            return self["second"](self["first"](x))

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


def by_layers(run):
    run.backward(run.mean(0, lambda x, _: reduce(lambda hidden, layer: layer(hidden), run.model, x).square().mean()))
    run.step()


@pytest.mark.parametrize("run", [run for run in SETTINGS if run != "fsdp"])  # torch gathers in the forward of units
def test_a_loop_over_the_layers_trains_as_in_one_process(run):
    assert_same_loop(by_layers, Case(build=make, batch=noise(4, 6)), SETTINGS[run])
