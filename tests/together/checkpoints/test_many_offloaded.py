"""Work of saves and loads with many parameters whose state is offloaded."""

import cProfile
import pstats

import torch
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks

OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0}


class Sum(nn.Module):
    """A model of many small parameters."""

    def __init__(self, num_params):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(num_params)])

    def forward(self, x):
        return sum((weight * x).sum() for weight in self.weights)


def calls_while_offloading(folder):
    counted = {}
    for num_params in (20, 100, 800):  # the first one imports
        model = Sum(num_params)
        booster = Booster(plugin=GeminiPlugin(**OFFLOADED, offload_dir=folder))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        booster.backward(boosted(torch.ones(())), optimizer)
        optimizer.step()
        booster.save_optimizer(optimizer, f"{folder}/{num_params}", shard=True)
        profile = cProfile.Profile()
        profile.runcall(booster.load_optimizer, optimizer, f"{folder}/{num_params}")
        counted[num_params] = pstats.Stats(profile).total_calls
    return counted[800] / counted[100]


def test_calls_grow_with_the_number_of_parameters_that_are_offloaded(tmp_path):
    (ratio,) = run_on_ranks(calls_while_offloading, 1, str(tmp_path))
    assert 4 < ratio < 9
