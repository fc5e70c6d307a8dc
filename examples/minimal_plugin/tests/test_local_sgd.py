"""Tests of local SGD itself: when ranks average, and that averaging after each step equals plain SGD."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_local_sgd import LocalSGDPlugin
from booster_testing import run_on_ranks

SAMPLES = torch.linspace(-1, 1, 8 * 3, dtype=torch.float64).reshape(8, 3)


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(rank_samples, plugin, num_steps):
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(num_steps):
        booster.backward(model(rank_samples).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def train_on_rank(sync_every, num_steps):
    rank = torch.distributed.get_rank()
    return train(SAMPLES.chunk(2)[rank], LocalSGDPlugin(sync_every=sync_every), num_steps)


def test_averaging_after_each_sgd_step_equals_training_on_the_global_batch():
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(SAMPLES).square().mean().backward()
        optimizer.step()
    for weights in run_on_ranks(train_on_rank, 2, 1, 3):
        # fp64; the two means differ by rounding only
        torch.testing.assert_close(weights, weights_of(model), rtol=1e-13, atol=1e-14)


def test_parameters_differ_between_averages_and_are_equal_after_them():
    first, second = run_on_ranks(train_on_rank, 2, 3, 2)
    assert not torch.equal(first, second)
    first, second = run_on_ranks(train_on_rank, 2, 3, 3)
    assert torch.equal(first, second)


def save_between_averages(path):
    rank = torch.distributed.get_rank()
    booster = Booster(plugin=LocalSGDPlugin(sync_every=3))
    model = new_model()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model(SAMPLES.chunk(2)[rank]).square().mean(), optimizer)
    optimizer.step()
    own = weights_of(model)
    booster.state_adapter(model)  # changes nothing
    assert torch.equal(weights_of(model), own)
    booster.save_model(model, path)
    return own, weights_of(model)


def test_a_save_averages_the_parameters(tmp_path):
    path = str(tmp_path / "model.safetensors")
    (first, saved), (second, saved_too) = run_on_ranks(save_between_averages, 2, path)
    assert not torch.equal(first, second)
    assert torch.equal(saved, saved_too)
    torch.testing.assert_close(saved, (first + second) / 2, rtol=1e-13, atol=1e-14)
    loaded = new_model()
    loaded.load_state_dict(load_file(path))
    assert torch.equal(weights_of(loaded), saved)


def test_sync_every_below_one_raises():
    with pytest.raises(ConfigError, match="`sync_every=0` counts optimizer steps and must be at least 1"):
        LocalSGDPlugin(sync_every=0)
