"""Optimizers whose step lets one parameter influence the update of another raise in their first step on shards."""

from functools import partial

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_runtime.sharding import CouplingCheck, may_couple


class Own(torch.optim.Optimizer):
    """Steps by a function of its parameters and learning rate."""

    def __init__(self, params, step_on):
        super().__init__(params, {"lr": 0.1})
        self.step_on = step_on

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.step_on(self, [p for p in group["params"] if p.grad is not None], group["lr"])


def momentum(optimizer, parameters, lr):
    for p in parameters:
        average = optimizer.state[p].setdefault("average", torch.zeros_like(p))
        average.mul_(0.9).add_(p.grad)
        p.addcdiv_(average, p.grad.abs().add_(1e-8), value=-lr)


def trust_ratios_in_lists(optimizer, parameters, lr):
    gradients = [p.grad for p in parameters]
    averages = [optimizer.state[p].setdefault("average", torch.zeros_like(p)) for p in parameters]
    torch._foreach_lerp_(averages, gradients, 0.1)
    norms = torch.stack(torch._foreach_norm(averages))
    ratios = torch.where(norms > 0, 1 / norms, 1.0).unbind()
    torch._foreach_add_(parameters, torch._foreach_mul(averages, ratios), alpha=-lr)


def data_in_the_memory_of_others(_optimizer, parameters, lr):
    free = torch.empty(max(p.numel() for p in parameters))
    for p in sorted(parameters, key=torch.numel, reverse=True):
        new, free = free[: p.numel()].view_as(p).copy_(p.data - lr * p.grad), p.data.flatten()
        p.data = new
        p.data.mul_(0.5)


def drops_gradients_after_reading_norms(optimizer, parameters, lr):
    for p in parameters:
        p.sub_(lr * p.grad)
    optimizer.norms = [p.grad.norm().item() for p in parameters]
    for p in parameters:
        p.grad = None


INDEPENDENT = [momentum, trust_ratios_in_lists, data_in_the_memory_of_others, drops_gradients_after_reading_norms]


def clips(_optimizer, parameters, lr):
    """As the optimizers that detectron2 makes, with the clipping of all parameters."""
    nn.utils.clip_grad_norm_(parameters, 0.01)
    for p in parameters:
        p.add_(p.grad, alpha=-lr)


def new_data(_optimizer, parameters, lr):
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for p in parameters:
        p.data = p.data - lr * p.grad / norm


def skips_all_where_one_is_nan(_optimizer, parameters, lr):
    if any(torch.isnan(p.grad).any() for p in parameters):
        return
    for p in parameters:
        p.add_(p.grad, alpha=-lr)


COUPLED = [clips, new_data, skips_all_where_one_is_nan]


def parameters_with_gradients():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in [(4, 3), (3,), (2, 2)]]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


@pytest.fixture
def alone(monkeypatch):
    """A rank that hears of no other."""

    class OwnFlags:
        def __init__(self, flags, *_):
            self.flags = flags

        def wait(self):
            return bytes(self.flags)

    monkeypatch.setattr("booster_runtime.sharding.elementwise.AnyRankFlags", OwnFlags)


def checked_step(step_on):
    parameters = parameters_with_gradients()
    optimizer = Own(parameters, step_on)
    check = CouplingCheck(optimizer, is_unknown=may_couple(optimizer, "auto"), device=torch.device("cpu"))
    check.run(optimizer.step)
    return check, optimizer, parameters


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step_on", INDEPENDENT, ids=lambda each: each.__name__)
def test_a_step_of_independent_parameters_is_as_it_was(step_on):
    _, _, stepped = checked_step(step_on)
    plain = parameters_with_gradients()
    Own(plain, step_on).step()
    assert all(map(torch.equal, stepped, plain))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step_on", COUPLED, ids=lambda each: each.__name__)
def test_a_step_in_which_one_parameter_influences_another_raises(step_on):
    with pytest.raises(ConfigError, match=r"Own lets one parameter influence the update of another.*plugin='ddp'"):
        checked_step(step_on)


@pytest.mark.usefixtures("alone")
def test_the_first_step_is_watched_alone_and_compiled_code_runs_eagerly_in_it():
    seen = []

    @partial(torch.compile, fullgraph=True, backend="eager")
    def direction(gradient):
        return gradient / gradient.norm()

    def step_on(_optimizer, parameters, lr):
        seen.append(len(torch.overrides._get_current_function_mode_stack()))
        for p in parameters:
            p.sub_(lr * direction(p.grad))

    check, optimizer, _ = checked_step(step_on)
    check.run(optimizer.step)
    assert seen == [1, 0]


@pytest.mark.parametrize(
    ("make", "asked", "expected"),
    [
        (torch.optim.AdamW, "auto", False),
        (torch.optim.Adafactor, "auto", False),
        (partial(Own, step_on=momentum), "auto", True),
        (partial(Own, step_on=momentum), "parameter", False),
        (type("Elementwise", (torch.optim.SGD,), {"is_elementwise": True}), "auto", False),
        (type("Clipped", (torch.optim.SGD,), {}), "auto", True),
    ],
)
def test_who_is_watched(make, asked, expected):
    assert may_couple(make(parameters_with_gradients()), asked) is expected
