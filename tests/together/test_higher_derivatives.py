"""Gradients of gradients, and transforms of torch.func, in the loss of a boosted model: as in one process."""

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, noise
from driven_runs import assert_same_loop, drive
from plugin_runs import RUNS
from ranked import raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing import expect_on_ranks
from booster_testing.program import RandomModel


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def penalty(model, x):
    x.requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return gradient.square().mean() + output.mean()


def penalty_of_penalty(model, x):
    x.requires_grad_()
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().mean()


def gradient_by_function(model, x):
    return torch.func.grad(lambda given: model(given).square().sum())(x).square().mean()


def vectorized(model, x):
    return torch.func.vmap(model)(x).square().mean()


def functional(model, x):
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, doubled, (x,)).square().mean()


LOSSES = {
    "penalty": penalty,
    "penalty of penalty": penalty_of_penalty,
    "torch.func.grad": gradient_by_function,
    "torch.func.vmap": vectorized,
    "torch.func.functional_call": functional,
}
REPLACED = r"Other tensors are in the place of parameters.*use plugin='ddp' or 'zero'"


def two_steps(run, *, name):
    for step in range(2):
        run.backward(run.mean(step, lambda x, _: LOSSES[name](run.model, x)))
        run.step()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_derivatives_in_a_loss_train_as_in_one_process(plugin, name):
    loop, case = partial(two_steps, name=name), Case(build=build, batch=noise(4, 8))
    if (plugin, name) == ("fsdp", "torch.func.functional_call"):
        expect_on_ranks(ConfigError, REPLACED, drive, 2, loop, case, RUNS[plugin], 2, {})
    else:
        assert_same_loop(loop, case, RUNS[plugin])


@pytest.mark.parametrize("options", [{}, {"replica_size": 2}], ids=["shards", "replicas"])
def test_derivatives_inside_of_forward_train_as_in_one_process(options):
    case = Case(build=partial(RandomModel, ("derived", "derived")), batch=noise(4, 8), micro_batches=2)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"unit_min_numel": 1, **options}))


@raises_on_ranks(ConfigError, REPLACED, 2)
def test_other_values_in_place_of_sharded_parameters_are_refused():
    """In the first step they are, too: above."""
    model = build()
    booster = Booster("cpu", plugin="fsdp")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model(torch.ones(2, 8)).mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    values = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, values, (torch.ones(2, 8),))
