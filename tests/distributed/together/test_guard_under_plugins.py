"""A guard leaves out the same step under every plugin, and what it leaves out changes nothing."""

import pytest
import torch
import torch.distributed as dist

from booster_core import Booster
from booster_testing import run_on_ranks
from booster_testing.training import whole_model
from booster_tools import guard

PLUGINS = ["ddp", "fsdp", "zero", "gemini"]


def train(plugin):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    states = []
    with guard(optimizer) as watch:
        for factor in (1.0, float("nan"), 1.0):
            loss = model(torch.ones(2, 8)).square().mean()
            booster.backward(loss * (factor if dist.get_rank() else 1.0), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            states.append(whole_model(booster, model)["weight"])
    assert watch.num_nonfinite == 1
    return torch.equal(states[0], states[1]), torch.equal(states[1], states[2]), bool(states[2].isfinite().all())


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_step_is_left_out_on_all_ranks(plugin):
    assert run_on_ranks(train, 2, plugin) == [(True, False, True)] * 2
