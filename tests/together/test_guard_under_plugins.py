"""A guard leaves out the same step under every plugin, and what it leaves out changes nothing."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks

from booster_core import Booster
from booster_core.errors import GradientError
from booster_testing.training import whole_model
from booster_tools import guard

PLUGINS = ["ddp", "fsdp", "zero", "gemini"]


@pytest.mark.parametrize("nan", ["skip", "stop"])
@pytest.mark.parametrize("plugin", PLUGINS)
@on_ranks(2)
def test_a_step_that_is_left_out_changes_nothing_on_any_rank(plugin, nan):
    """Train three steps, of which the second has a NaN among the first rank's inputs, and save after each."""
    torch.manual_seed(0)
    # Statistics of the inputs are NaN in the forward of that step, before anybody can decide.
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    states = []
    torch.manual_seed(1 + dist.get_rank())
    with guard(optimizer, nan=nan) as watch:
        for step in range(3):
            inputs = torch.randn(4, 8)
            if step == 1 and dist.get_rank() == 0:
                inputs[0, 0] = float("nan")
            booster.backward(model(inputs).square().mean(), optimizer)
            with pytest.raises(GradientError) if step == 1 and nan == "stop" else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
            states.append(whole_model(booster, model))
    assert watch.num_nonfinite == 1
    first, second, third = states
    assert first.keys() == {"0.weight", "0.bias", "0.running_mean", "0.running_var", "0.num_batches_tracked"} | {
        "1.weight",
        "1.bias",
    }
    assert all(bool(each.isfinite().all()) for each in third.values())
    changed = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert (changed, sum(not torch.equal(value, third[name]) for name, value in second.items())) == ([], 7)
