"""A script or a forward that changes parameters: it trains as in one process, or raises on every rank.

That is where the change would be lost, or is not the same on ranks that hold the same.
"""

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_equals_one_process, noise, train_boosted
from plugin_runs import RUNS, boosted
from ranked import on_ranks
from torch import nn

from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)


CASE = Case(build=Clamped, batch=noise(4, 8), steps=2)


@pytest.mark.parametrize(
    ("plugin", "match"),
    [
        ("fsdp", "'inner.weight' was changed during forward. FSDP drops"),
        ("gemini", "'inner.weight' was changed in place"),
    ],
)
def test_change_of_a_gathered_parameter_raises(plugin, match):
    expect_on_ranks(ConfigError, match, train_boosted, 2, CASE, RUNS[plugin])


REPLICATED = ["ddp", "zero1", "hybrid-dp"]


@pytest.mark.parametrize("plugin", REPLICATED)
def test_change_of_a_replicated_parameter_trains(plugin):
    assert_equals_one_process(CASE, RUNS[plugin])


def resets(model):
    """Reset a layer, as agents that learn from rewards do every so many steps."""
    torch.manual_seed(dist.get_rank())
    model.unwrap().inner.reset_parameters()


def loads_on_one_rank(model):
    if dist.get_rank() == 0:
        model.load_state_dict({name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()})


class Normalized(nn.Linear):
    """Sets its bias by the first batch, as activation normalization of flows (Kingma and Dhariwal, Glow, 2018)."""

    def __init__(self, *, past_autograd):
        super().__init__(8, 8)
        self.is_begun, self.past_autograd = False, past_autograd

    def forward(self, x):
        if not self.is_begun:
            with torch.no_grad():
                (self.bias.data if self.past_autograd else self.bias).copy_(-super().forward(x).mean(0))
            self.is_begun = True
        return super().forward(x)


def train(booster, model, optimizer):
    """Step on batches of each rank: some strategies tell the others in a step, and raise in the next one."""
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(2):
        booster.backward(model(torch.randn(5, 8)).square().mean(), optimizer)
        optimizer.step()


DIFFERS = "what was written to '{}'.*seeded alike"


@pytest.mark.parametrize("plugin", REPLICATED)
@pytest.mark.parametrize("write", [resets, loads_on_one_rank])
@on_ranks(2)
def test_values_that_a_script_writes_and_that_differ_between_ranks_raise(plugin, write):
    run = boosted(RUNS[plugin], Clamped())
    train(*run)
    write(run[1])
    with pytest.raises(ConfigError, match=DIFFERS.format("inner.weight")):
        train(*run)


@pytest.mark.parametrize("plugin", ["zero3", "gemini", "fsdp"])
@pytest.mark.parametrize("evaluates", [False, True])
@on_ranks(2)
def test_values_of_a_first_batch_raise_where_they_would_be_lost(plugin, evaluates):
    model = Normalized(past_autograd=True)
    run = boosted(RUNS[plugin], model)
    if evaluates:
        model.is_begun = True
        with torch.no_grad():
            run[1](torch.ones(5, 8))
        model.is_begun = False
    with pytest.raises(ConfigError, match=r"'bias' was changed"):
        train(*run)


@pytest.mark.parametrize("plugin", REPLICATED)
@pytest.mark.parametrize("past_autograd", [False, True])
@on_ranks(2)
def test_values_of_a_first_batch_raise_where_ranks_have_other_ones(plugin, past_autograd):
    run = boosted(RUNS[plugin], Normalized(past_autograd=past_autograd))
    with pytest.raises(ConfigError, match=DIFFERS.format("bias")):
        train(*run)
