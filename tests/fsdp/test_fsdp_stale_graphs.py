"""Backward through a graph that is older than the parameters raises, as autograd does without FSDP."""

import pytest
import torch
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster, PrecisionPolicy
from booster_core.errors import GradientError
from booster_core.precision import LossScaleConfig
from booster_core.ranks.coordinator import DistCoordinator
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import full_gradient


class Net(nn.Module):
    def __init__(self, *, recomputed=False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.recomputed = recomputed

    def forward(self, x):
        hidden = self.first(x).tanh()
        second = lambda h: self.second(h).tanh()  # noqa: E731
        return checkpoint(second, hidden, use_reentrant=True) if self.recomputed else second(hidden)


UNITS = {
    "one unit": {"unit_min_numel": 1000},
    "root without parameters": {"unit_min_numel": 8},
    "kept gathered": {"unit_min_numel": 8, "reshard_after_forward": False},
    "whole parameters": {"unit_min_numel": 8, "partition": "parameter"},
}


def boost(options, precision=None, **kwargs):
    torch.manual_seed(0)
    booster = Booster("cpu", precision, TorchFSDPPlugin(**options))
    model = Net(**kwargs)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def data(step=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


@matrix(
    ["one unit-loss-False", "root without parameters-optimizer-True", "kept gathered-optimizer-False"],
    1,
    name=UNITS,
    by=["optimizer", "loss"],
    recomputed=[False, True],
)
@on_ranks(2)
def test_backward_of_a_graph_older_than_the_step_raises(name, by, recomputed):
    _, model, optimizer = boost(UNITS[name], recomputed=recomputed)
    old = model(data())
    optimizer.backward(model(data(1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    loss = old.square().mean()
    where = "" if recomputed else ".*before the step"
    with pytest.raises(GradientError, match=f"modified by an inplace operation{where}"):
        loss.backward() if by == "loss" else optimizer.backward(loss)


@raises_on_ranks(GradientError, "modified by an inplace operation", 2)
def test_second_backward_through_one_forward_after_the_step_raises():
    _, model, optimizer = boost(UNITS["one unit"])
    out = model(data())
    optimizer.backward(out.square().mean(), retain_graph=True)
    optimizer.step()
    optimizer.backward(out.abs().mean())


@raises_on_ranks(GradientError, "loading a checkpoint", 2)
def test_backward_of_a_graph_older_than_loading_raises(tmp_path):
    folder = tmp_path / "model"
    booster, model, optimizer = boost(UNITS["one unit"])
    booster.save_model(model, folder)
    out = model(data())
    booster.load_model(model, folder)
    optimizer.backward(out.square().mean())


@on_ranks(2)
def test_training_continues_after_the_error():
    """Catch the error; the next gradients must equal those of a newly boosted model."""
    gradients = []
    for raises in (True, False):
        booster, model, optimizer = boost(UNITS["root without parameters"])
        old = model(data())
        optimizer.backward(model(data(1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if raises:
            with pytest.raises(GradientError):
                optimizer.backward(old.square().mean())
        optimizer.backward(model(data(2)[DistCoordinator().rank :: 2]).square().mean())
        gradients.append({name: full_gradient(booster, model, name) for name, _ in Net().named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@on_ranks(2)
def test_graphs_with_unchanged_parameters_run_backward():
    """Run two forwards with a step of another model in between, and a step that an overflow skips."""
    _, model, optimizer = boost(UNITS["one unit"])
    _, other, other_optimizer = boost(UNITS["one unit"])
    first, second = model(data()), model(data(1))
    optimizer.backward(first.square().mean())
    other_optimizer.backward(other(first.detach()[:, :6]).square().mean())
    other_optimizer.step()
    optimizer.backward(second.square().mean())
    optimizer.step()
    policy = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=2.0**24))
    _, model, optimizer = boost(UNITS["one unit"], policy)
    out = model(data())
    optimizer.backward((out * 1e30).square().mean(), retain_graph=True)
    before = [parameter.full_tensor() for parameter in model.parameters()]
    optimizer.step()
    after = [parameter.full_tensor() for parameter in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "the step was not skipped"
    optimizer.zero_grad()
    optimizer.backward(out.square().mean())
