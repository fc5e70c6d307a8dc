"""Replicas that drift are found, with the tensor, the ranks and the step."""

import gc
import weakref

import pytest
import torch
from reference_plugins import ReferencePlugin
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import unwrap_model
from booster_core.ranks import DistCoordinator
from booster_runtime import check_replicas
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import TinyMLP


def boost():
    torch.manual_seed(0)
    model = TinyMLP()
    booster = Booster(plugin=ReferencePlugin())
    boosted = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return booster, boosted.model, boosted.optimizer


def step(booster, model, optimizer):
    booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def train_checked():
    booster, model, optimizer = boost()
    with check_replicas(booster, model, every=1) as check:
        for _ in range(3):
            step(booster, model, optimizer)
    step(booster, model, optimizer)
    return check.steps


def test_equal_replicas_pass_and_a_closed_check_counts_no_more():
    assert run_on_ranks(train_checked, 2) == [3, 3]


def drift(what):
    booster, model, optimizer = boost()
    check_replicas(booster, model, every=2)
    first = DistCoordinator().rank == 0
    step(booster, model, optimizer)
    step(booster, model, optimizer)
    with torch.no_grad():
        if what == "parameter" and first:
            unwrap_model(model).second.bias[0] += 1e-6
        elif what == "optimizer" and first:
            next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-6
        elif what == "random" and first:
            torch.rand(())
    step(booster, model, optimizer)  # not checked
    try:
        step(booster, model, optimizer)
    except GradientError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("parameter", "'second.bias' (rank 0 against rank 1)"),
        ("optimizer", "'exp_avg' of 'first.weight' (rank 0 against rank 1)"),
    ],
)
def test_a_drift_is_named_on_every_rank(what, message):
    messages = run_on_ranks(drift, 2, what)
    assert messages[0] == messages[1]
    assert "differ after step 4; they were equal after step 2" in messages[0]
    assert message in messages[0]


def test_data_parallel_ranks_may_draw_different_random_numbers():
    assert run_on_ranks(drift, 2, "random") == [None, None]


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, inputs):
        return self.layers(inputs)


def train_batch_norm():
    torch.manual_seed(0)
    model = WithBatchNorm()
    booster = Booster(plugin=ReferencePlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with check_replicas(booster, model, every=1):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(DistCoordinator().rank))
        booster.backward(model(inputs).square().mean(), optimizer)
        optimizer.step()
    return True


def test_running_statistics_of_batch_norm_may_differ():
    assert run_on_ranks(train_batch_norm, 2) == [True, True]


def check_and_drop():
    booster, model, optimizer = boost()
    check = check_replicas(booster, model, every=1)
    step(booster, model, optimizer)
    seen = weakref.ref(model), weakref.ref(model.unwrap()), weakref.ref(booster)
    del booster, model, optimizer
    gc.collect()
    assert [each() for each in seen] == [None] * 3
    with pytest.raises(ConfigError, match="the model of this check is no more"):
        check.check()
    again, other, optimizer = boost()
    step(again, other, optimizer)
    assert check.steps == 1
    check.close()


def test_a_check_that_is_open_keeps_no_model():
    run_on_ranks(check_and_drop, 2)


def check_without_booster():
    booster, model, optimizer = boost()
    check_replicas(booster, model, every=1)
    loss = model(torch.ones(2, 8)).square().mean()
    del booster
    gc.collect()
    if DistCoordinator().rank == 0:
        next(iter(model.parameters())).data += 1
    optimizer.backward(loss)
    optimizer.step()


def test_a_check_goes_on_without_its_booster():
    expect_on_ranks(GradientError, "differ after step 1", check_without_booster, 2)


def test_a_number_of_steps_below_one_raises():
    booster = Booster()
    model = booster.boost(nn.Linear(2, 2)).model
    with pytest.raises(ConfigError, match="`every=0` is not a number of steps"):
        check_replicas(booster, model, every=0)
