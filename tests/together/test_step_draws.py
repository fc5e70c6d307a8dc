"""Optimizers that draw random numbers in their steps, such as Langevin dynamics: replicas stay equal."""

import pytest
import torch
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import load
from booster_runtime import collectives
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.training import whole_model


class Langevin(torch.optim.SGD):
    """SGD that adds noise from a number of steps on."""

    def __init__(self, params, lr, first=0):
        super().__init__(params, lr)
        self.first, self.count = first, 0

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and self.count >= self.first:
                    p.add_(torch.randn_like(p), alpha=0.01)
        self.count += 1
        return result


SETTINGS = {
    "ddp": ("ddp", {}, 2),
    "zero": ("zero", {"replica_size": 2}, 4),
    "zero alone": ("zero", {}, 2),
    "gemini": ("gemini", {"replica_size": 2}, 4),
    "fsdp": ("fsdp", {"replica_size": 2}, 4),
    "hybrid": ("hybrid", {}, 2),
    "hybrid, zero 1": ("hybrid", {"zero_stage": 1}, 2),
}


def step(booster, model, optimizer):
    booster.backward(model(torch.randn(2, 8)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def boost(name, **options):
    plugin, settings, _ = SETTINGS[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    booster = Booster(plugin=load(plugin)(**settings))
    model, optimizer, *_ = booster.boost(net, Langevin(net.parameters(), 0.1, **options))
    return booster, model, optimizer


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(lambda name: SETTINGS[name][2])
def test_ranks_step_on_the_same_values_with_the_same_noise_and_go_on_with_their_own(name):
    booster, model, optimizer = boost(name)
    before = {key: each.clone() for key, each in whole_model(booster, model).items()}
    for _ in range(3):
        step(booster, model, optimizer)
    found = whole_model(booster, model)
    for other in collectives.all_gather_object(found):
        assert_same_tensors(other, found, EXACT)
    assert all((found[key] - each).abs().max() > 1e-3 for key, each in before.items())
    drawn = collectives.all_gather_object(float(torch.rand(())))
    assert len(set(drawn)) == len(drawn)


@raises_on_ranks(ConfigError, "drawn random numbers in a step, and drew none in its first", 2)
def test_draws_that_begin_later_are_refused():
    booster, model, optimizer = boost("ddp", first=1)
    for _ in range(2):
        step(booster, model, optimizer)
