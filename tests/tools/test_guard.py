"""A guard leaves out steps that would spoil the model, on all ranks together."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranked import raises_on_ranks
from reference_plugins import ReferencePlugin

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_testing import run_on_ranks
from booster_tools import guard

NAN = float("nan")


def inputs(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(steps, left_out):
    """Train in one process on the samples of both ranks, without the steps that a guard leaves out."""
    model, optimizer = make()
    for step in range(steps):
        if step not in left_out:
            model(torch.cat([inputs(step, rank) for rank in range(2)])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def boosted():
    model, optimizer = make()
    booster = Booster(plugin=ReferencePlugin())
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def train(factors, settings, max_norm=None):
    """Train on two ranks, of which the last multiplies its loss by a step's factor."""
    booster, model, optimizer = boosted()
    with guard(optimizer, **settings) as watch:
        for step, factor in enumerate(factors):
            loss = model(inputs(step, dist.get_rank())).square().mean()
            booster.backward(loss * (factor if dist.get_rank() else 1.0), optimizer)
            if max_norm is not None:
                optimizer.clip_grad_by_norm(max_norm)
            optimizer.step()
            optimizer.zero_grad()
    assert not optimizer.before_step
    return copy.deepcopy(model.state_dict()), watch.num_nonfinite, watch.num_spikes


@pytest.mark.parametrize("max_norm", [None, 1e9], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("bad", [NAN, float("inf")], ids=str)
def test_a_step_that_is_not_finite_is_left_out_on_all_ranks(bad, max_norm):
    expected = plain(4, {1})
    for state, num_nonfinite, num_spikes in run_on_ranks(train, 2, [1.0, bad, 1.0, 1.0], {}, max_norm):
        assert (num_nonfinite, num_spikes) == (1, 0)
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor)


def test_a_spike_is_left_out_once_there_is_a_usual_norm():
    expected = plain(10, {9})
    for state, *counts in run_on_ranks(train, 2, [1.0] * 9 + [1e4], {"spike": 20.0}):
        assert counts == [0, 1]
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor)


@raises_on_ranks(GradientError, "Step 1 is not taken: the gradient norm is nan", 2)
def test_a_stop_raises_on_every_rank_and_leaves_a_healthy_model():
    booster, model, optimizer = boosted()
    before = copy.deepcopy(model.state_dict())
    with guard(optimizer, nan="stop"):
        loss = model(inputs(0, dist.get_rank())).square().mean()
        booster.backward(loss * (NAN if dist.get_rank() else 1.0), optimizer)
        try:
            optimizer.step()
        finally:
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@raises_on_ranks(GradientError, "3 steps in a row were left out", 2)
def test_too_many_in_a_row_raise_on_every_rank():
    train([NAN] * 4, {"most_in_a_row": 2})


def test_what_can_not_be_guarded_is_refused():
    model, optimizer = make()
    with pytest.raises(TypeError, match=r"needs the optimizer returned by `Booster.boost`; got `AdamW`"):
        guard(optimizer)
    model, optimizer, *_ = Booster().boost(model, optimizer)
    for settings in ({"nan": "ignore"}, {"spike": 1.0}, {"most_in_a_row": 0}):
        with pytest.raises(ConfigError, match=f"`{next(iter(settings))}="):
            guard(optimizer, **settings)
    with guard(optimizer), pytest.raises(GradientError, match="needs a closure makes its gradients in the step"):
        optimizer.step(lambda: 0.0)
