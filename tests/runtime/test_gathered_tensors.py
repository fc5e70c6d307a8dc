"""Whole parameters, optimizer state and gradients of replicas: read and changed by name, on every rank alike."""

import pytest
import torch
from ranked import on_ranks
from reference_plugins import ReferencePlugin

from booster_core import Booster
from booster_core.errors import ConfigError, PluginError
from booster_core.plugin import write_gradient
from booster_runtime import full_gradient, full_state, gathered, set_full_gradient, set_full_state
from booster_testing.models import TinyMixedBag, TinyMLP

WEIGHT = "first.weight"


class SetsGradients(ReferencePlugin):
    """Also replaces gradients."""

    api_version = 2

    def set_full_gradient(self, model, name, values):
        write_gradient(model.unwrap().get_parameter(name).grad, values, model.boosted_optimizers)


def boost(plugin=None, precision=None, model_class=TinyMLP):
    torch.manual_seed(0)
    model = model_class()
    booster = Booster("cpu", precision, plugin=plugin or SetsGradients())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return booster, model, optimizer


def backward(booster, model, optimizer):
    x = torch.full((2, 8), 1.0 + booster.context.coordinator.rank)
    booster.backward(model(x).square().mean(), optimizer)


@on_ranks(2)
def test_masters_follow_and_lead():
    booster, model, optimizer = boost(precision="bf16")
    with gathered(booster, model, [WEIGHT], writes=True) as tensors:
        tensors[WEIGHT].fill_(0.75)
    backward(booster, model, optimizer)
    set_full_gradient(booster, model, WEIGHT, torch.full((16, 8), 1e-4))
    optimizer.step()
    master = full_state(booster, model, WEIGHT, "master")
    torch.testing.assert_close(master, torch.full((16, 8), 0.75 - 1e-5), rtol=0, atol=1e-7)
    set_full_state(booster, model, WEIGHT, "master", torch.full((16, 8), 0.123))
    assert bool((model.unwrap().first.weight == torch.tensor(0.123).bfloat16()).all())


@on_ranks(2)
def test_tied_tensors_and_buffers_are_found_by_any_name():
    booster, model, _ = boost(model_class=TinyMixedBag)
    with gathered(booster, model, ["head.weight", "scale"], writes=True) as tensors:
        tensors["head.weight"].fill_(3.0)
        tensors["scale"].fill_(2.0)
    inner = model.unwrap()
    assert (bool((inner.embedding.weight == 3).all()), bool((inner.scale == 2).all())) == (True, True)


@on_ranks(2)
def test_what_is_not_there_or_does_not_fit_is_named_on_every_rank():
    booster, model, optimizer = boost()
    rank = booster.context.coordinator.rank
    with pytest.raises(ConfigError, match=f"Did you mean '{WEIGHT}'"), gathered(booster, model, [WEIGHT[:-1]]):
        pass
    with pytest.raises(TypeError, match="list of names"), gathered(booster, model, WEIGHT):
        pass
    with pytest.raises(ConfigError, match="on rank 1"), gathered(booster, model, [WEIGHT, "first.bias"][rank:]):
        pass
    with pytest.raises(ConfigError, match="momentum_buffer"):
        full_state(booster, model, WEIGHT, "momentum_buffer")  # before the first step
    with pytest.raises(ConfigError, match=r"'first\.weight' has no gradient to replace"):
        set_full_gradient(booster, model, WEIGHT, torch.zeros(16, 8))
    backward(booster, model, optimizer)
    optimizer.step()
    with pytest.raises(ConfigError, match=r"has shape \(\d,\); the state 'momentum_buffer' of 'first\.weight'"):
        set_full_state(booster, model, WEIGHT, "momentum_buffer", torch.zeros(2 + rank))
    with pytest.raises(ConfigError, match=r"`values` has shape \(\d,\); the gradient of 'first\.weight'"):
        set_full_gradient(booster, model, WEIGHT, torch.zeros(2 + rank))
    whole = full_gradient(booster, model, WEIGHT)
    with pytest.raises(TypeError, match=f"in the shape of '{WEIGHT}'; got `list`"):
        set_full_gradient(booster, model, WEIGHT, whole if rank else whole.tolist())  # rank 0's alone is wrong
    set_full_gradient(booster, model, WEIGHT, torch.ones_like(whole) if rank else -whole)
    assert torch.equal(full_gradient(booster, model, WEIGHT), -whole), "rank 0's values count"


@on_ranks(2)
def test_a_plugin_that_can_not_set_gradients_says_so():
    booster, model, optimizer = boost(ReferencePlugin())
    backward(booster, model, optimizer)
    with pytest.raises(PluginError, match="'reference' keeps gradients in its own way, and has no `set_full_gradient`"):
        set_full_gradient(booster, model, WEIGHT, torch.zeros(16, 8))


def test_gradients_of_one_process_are_set_and_sparse_ones_are_not():
    booster, model = Booster("cpu"), torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward(model(torch.tensor([1, 2])).sum(), optimizer)
    before = model.unwrap()[1].bias.item()
    set_full_gradient(booster, model, "1.bias", torch.tensor([0.5]))
    optimizer.step()
    assert model.unwrap()[1].bias.item() == pytest.approx(before - 0.5)
    with pytest.raises(ConfigError, match=r"The gradient of '0\.weight' is sparse and can't be set"):
        set_full_gradient(booster, model, "0.weight", torch.zeros(4, 2))
