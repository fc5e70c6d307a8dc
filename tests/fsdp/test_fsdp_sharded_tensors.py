"""Sharded parameters and their gradients: numbers are those of one process, and what can't be done on shards raises."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, noise
from driven_runs import assert_same_loop
from matrix import matrix
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_fsdp import TorchFSDPPlugin


def boosted(model):
    return Booster("cpu", plugin=TorchFSDPPlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1)).model


NUMBERS = {
    "norm().item()": lambda tensor: tensor.norm().item(),
    "float(abs().max())": lambda tensor: float(tensor.detach().abs().max()),
    "(> 0).sum().item()": lambda tensor: (tensor > 0).sum().item(),
    "linalg.vector_norm": lambda tensor: torch.linalg.vector_norm(tensor).item(),
    "_foreach_norm": lambda tensor: torch._foreach_norm([tensor])[0].item(),
    "one element": lambda tensor: tensor[4, 1].item(),
    "if tensor.any()": lambda tensor: bool((tensor > 0.1).any()),
    "torch.equal": lambda tensor: torch.equal(tensor, tensor * 1),
}


@pytest.mark.parametrize("of", ["parameter", "gradient"])
@on_ranks(2)
def test_numbers_are_those_of_the_whole_tensor(of):
    torch.manual_seed(0)
    whole = nn.Linear(6, 5)
    torch.manual_seed(0)
    model = boosted(nn.Linear(6, 5))
    for each in (whole, model):
        each(torch.ones(2, 6)).square().sum().backward()
    tensors = [each.get_parameter("weight") for each in (whole, model)]
    one, ours = [tensor.grad if of == "gradient" else tensor for tensor in tensors]
    if of == "gradient":
        assert tensors[1].grad is ours
        one.mul_(0.5), ours.mul_(0.5)
    for name, read in NUMBERS.items():
        assert read(ours) == pytest.approx(read(one)), name


def assign(parameter, index, values):
    parameter[index] = values


LOST_OR_NOT_POSSIBLE = {
    "an element": lambda parameter: assign(parameter, (4, 1), 3.0),
    "a row": lambda parameter: parameter[4].zero_(),
    "a plain tensor": lambda parameter: parameter.copy_(torch.ones(5, 6)),
    "other data": lambda parameter: setattr(parameter, "data", torch.ones(5, 6)),
    "random numbers": nn.init.normal_,
    "an orthogonal matrix": nn.init.orthogonal_,
    "a plain tensor on the left": lambda parameter: torch.ones(5, 6) - parameter,
    "a norm in place": lambda parameter: parameter.norm().clamp_(min=2),
    "a hook": lambda parameter: parameter.register_hook(lambda gradient: 2 * gradient),
}


@pytest.mark.parametrize("name", LOST_OR_NOT_POSSIBLE)
@on_ranks(2)
def test_what_would_be_lost_raises_and_works_on_whole_parameters(name):
    """Return whether a write raises, and what `whole_parameters` makes of it."""
    torch.manual_seed(0)
    model, whole = boosted(nn.Linear(6, 5)), nn.Linear(6, 5)
    before = model.get_parameter("weight").full_tensor()
    with torch.no_grad():
        whole.weight.copy_(before)
        with pytest.raises(ConfigError, match=r"whole_parameters|would never run"):
            LOST_OR_NOT_POSSIBLE[name](model.get_parameter("weight"))
        assert torch.equal(model.get_parameter("weight").full_tensor(), before)
        if name == "a hook":
            return
        torch.manual_seed(5)
        LOST_OR_NOT_POSSIBLE[name](whole.weight)
        torch.manual_seed(5 + dist.get_rank())
        with model.whole_parameters(writes=True):
            LOST_OR_NOT_POSSIBLE[name](model.get_parameter("weight"))
    assert torch.equal(model.get_parameter("weight").full_tensor(), whole.weight)


@on_ranks(2)
def test_parts_run_on_whole_parameters():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 4))

        def encode(self, data):
            return data @ self.table

        forward = encode

    model = boosted(nn.Sequential(Encoder()))
    with pytest.raises(ConfigError, match="forward_methods"):
        model.unwrap()[0].encode(torch.ones(2, 4))
    with model.whole_parameters():
        assert torch.equal(model.unwrap()[0].encode(torch.ones(2, 4)), torch.full((2, 4), 4.0))
        with pytest.raises(ConfigError, match="ran inside of `whole_parameters`"):
            model(torch.ones(2, 4))
    with pytest.raises(ConfigError, match="`writes=True`"), torch.no_grad(), model.whole_parameters():
        model.unwrap()[0].table.zero_()
    assert model.unwrap()[0].table.norm().item() == 4.0
    assert model(torch.ones(2, 4)).sum().item() == 32.0


# ---- gradients that do not come from a unit's forward


class Sided(nn.Module):
    """A trunk and two branches, one of which is not used."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.left, self.right = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x):
        return self.left(self.trunk(x).tanh())


def whole(run):
    return contextlib.nullcontext() if run.booster is None else run.model.whole_parameters()


def penalty(run):
    return sum(parameter.square().sum() for parameter in run.model.parameters())


def penalizes_whole_parameters(run):
    for step in range(2):
        loss = run.loss(step)
        with whole(run):
            loss = loss + run.mean(step, lambda batch, rank: (1 + rank) * penalty(run))
        run.backward(loss)
        run.step(max_norm=0.5)


def side(net, x):
    """Return what a part computes without its modules, which are units."""
    hidden = nn.functional.linear(x, net.trunk.weight, net.trunk.bias)
    return nn.functional.linear(hidden, net.right.weight, net.right.bias).square().mean()


def computes_a_part(run):
    for step in range(2):
        with run.no_sync():
            run.backward(run.loss(step))
        with whole(run):
            run.backward(run.mean(step, lambda batch, _: side(run.net, batch)))
        run.step()


def penalizes_shards(run):
    for step in range(2):
        added = penalty(run)
        run.backward(run.loss(step) + (added if run.booster is None else added.full_tensor()))
        run.step()


@matrix(
    1,
    loop=[penalizes_whole_parameters, computes_a_part, penalizes_shards],
    options=[{}, {"unit_min_numel": 1}, {"unit_min_numel": 1, "replica_size": 2}],
)
def test_gradients_from_outside_of_units_equal_one_process(loop, options):
    assert_same_loop(loop, Case(build=Sided, batch=noise(4, 6)), Setting(TorchFSDPPlugin, options))


@on_ranks(2)
def test_gradients_of_whole_values_from_before_a_step_raise():
    torch.manual_seed(0)
    net = Sided()
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with model.whole_parameters():
        added = sum(parameter.square().sum() for parameter in model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(GradientError, match="forward again"):
        added.backward()
