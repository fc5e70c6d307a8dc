"""Gradients that DDP's reducer does not average are averaged at the step, or raise on every rank."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError, MissingRanksError
from booster_ddp import TorchDDPPlugin
from booster_testing import RankError, expect_on_ranks, run_on_ranks
from booster_testing.models import TinyMLP


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, sides="lr"):
        hidden = self.trunk(x).tanh()
        return tuple(layer(hidden) for side, layer in (("l", self.left), ("r", self.right)) if side in sides)


def boost(model, **options):
    torch.manual_seed(0)
    booster = Booster("cpu", plugin=TorchDDPPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def own(step=0):
    whole = torch.randn(4 * dist.get_world_size(), 8, generator=torch.Generator().manual_seed(step))
    return whole[dist.get_rank() :: dist.get_world_size()]


def other_side_after_no_sync():
    booster, model, optimizer = boost(Heads())
    for sides in (("lr", "lr"), ("l", "r")):
        with booster.no_sync(model):
            booster.backward(sum(out.square().mean() for out in model(own(), sides[0])), optimizer)
        booster.backward(sum(out.square().mean() for out in model(own(), sides[1])), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def test_synchronized_backward_through_other_parameters_than_under_no_sync_raises():
    expect_on_ranks(
        GradientError, "could not finish averaging.*find_unused_parameters=True", other_side_after_no_sync, 2
    )


def gradient_alone():
    booster, model, optimizer = boost(Heads())
    inputs = own().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs, "l")[0].sum(), inputs, create_graph=True)
    booster.backward(gradient.square().mean(), optimizer)
    optimizer.step()


def test_the_search_is_not_advised_where_it_has_found_what_the_loss_leaves_out():
    remedy = r"not in this backward.*'left\.bias'.*\. Run every forward and backward of the step under"
    expect_on_ranks(GradientError, remedy, gradient_alone, 2)


def losses_of_two_heads(*, under_no_sync):
    booster, model, optimizer = boost(Heads(), find_unused_parameters=False)
    for _ in range(2):
        with booster.no_sync(model) if under_no_sync else contextlib.nullcontext():
            left, right = model(own())
            optimizer.backward(left.square().mean(), retain_graph=True)
            optimizer.backward(right.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}


def test_two_losses_that_share_some_parameters_raise_and_name_no_sync():
    expect_on_ranks(
        GradientError,
        "all forward and backward passes.*`booster.no_sync`",
        losses_of_two_heads,
        2,
        under_no_sync=False,
    )


def test_two_losses_that_share_some_parameters_are_averaged_under_no_sync():
    first, second = run_on_ranks(losses_of_two_heads, 2, under_no_sync=True)
    torch.manual_seed(0)
    reference = Heads()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        left, right = reference(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
        (left.square().mean() + right.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in reference.named_parameters():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], parameter.detach(), msg=lambda text, name=name: f"{name}: {text}")


USES = {
    "stepped": [("lr", "lr")],
    "stepped twice": [("lr", "lr"), ("r", "lr")],
    "on one rank": [("lr", "l")],
    "dropped": [("lr", "lr")],
    "dropped by hand": [("lr", "lr")],
    "averaged and dropped": [("lr", "lr")],
}
"""What each rank uses in steps wholly under `no_sync`, by what becomes of their gradients."""


def sides_after(after, rank):
    return {"left": "l", "apart": "lr"[rank], "both": "lr"}[after]


def run_steps(backward, parameters, optimizer, how, first, after):
    """Take steps; return the gradients by name of the step that follows those under `no_sync`, and of the one after.

    Args:
        backward: Called with the step, the sides that ranks use and whether the step is under `no_sync`.
        parameters: Of the model, by name.
        optimizer: Steps and drops gradients.
        how: What becomes of the gradients under `no_sync`.
        first: What both ranks use in the first step.
        after: What the ranks use after `no_sync`.
    """
    found, uses = [], USES[how]
    steps = [(first, first), *uses, (sides_after(after, 0), sides_after(after, 1)), ("lr", "lr")]
    for step, sides in enumerate(steps):
        backward(step, sides, 1 <= step <= len(uses))
        if step > len(uses):
            found.append({name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()})
        if step == 0 or "dropped" not in how or step > len(uses):
            optimizer.step()
        if how == "dropped by hand":
            for parameter in parameters.values():
                parameter.grad = None
        else:
            optimizer.zero_grad()
    return found


def batch_of(step, rank):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))[rank::2]


def steps_on_ranks(options, how, first, after):
    booster, model, optimizer = boost(Heads(), **options)
    rank = dist.get_rank()

    def backward(step, sides, is_under_no_sync):
        with booster.no_sync(model) if is_under_no_sync else contextlib.nullcontext():
            loss = sum(out.square().mean() for out in model(batch_of(step, rank), sides[rank]))
            booster.backward(loss, optimizer)
        if is_under_no_sync and how == "averaged and dropped":
            optimizer.clip_grad_by_norm(1.0)

    return run_steps(backward, dict(model.unwrap().named_parameters()), optimizer, how, first, after)


def steps_in_one_process(how, first, after):
    torch.manual_seed(0)
    model = Heads()

    def backward(step, sides, is_under_no_sync):
        del is_under_no_sync
        for rank in range(2):
            (sum(out.square().mean() for out in model(batch_of(step, rank), sides[rank])) / 2).backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return run_steps(backward, dict(model.named_parameters()), optimizer, how, first, after)


def check_steps(options, how, after, first="lr"):
    expected = steps_in_one_process(how, first, after)
    for found in run_on_ranks(steps_on_ranks, 2, options, how, first, after):
        for step, gradients in enumerate(expected):
            for name, gradient in gradients.items():
                if gradient is None:
                    assert found[step][name] is None, (step, name)
                else:
                    torch.testing.assert_close(
                        found[step][name], gradient, msg=lambda text, name=name: f"{name}: {text}"
                    )


@pytest.mark.parametrize("after", ["left", "apart"])
@pytest.mark.parametrize("how", USES)
def test_a_step_under_no_sync_and_one_that_leaves_parameters_out(how, after):
    check_steps({"find_unused_parameters": True}, how, after)


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True, "gradient_as_bucket_view": True}, {"find_unused_parameters": None}]
)
@pytest.mark.parametrize("how", ["stepped", "dropped"])
def test_a_step_under_no_sync_with_other_options(options, how):
    check_steps(options, how, "left", first="l")  # so that the first step decides on a search


@pytest.mark.parametrize("how", USES)
def test_a_step_under_no_sync_where_no_parameter_is_searched_for(how):
    check_steps({"find_unused_parameters": False}, how, "both")


def drop_one_by_hand():
    booster, model, optimizer = boost(Heads(), find_unused_parameters=True)
    with booster.no_sync(model):
        booster.backward(sum(out.square().mean() for out in model(own())), optimizer)
    model.unwrap().right.weight.grad = None
    booster.backward(model(own(), "l")[0].square().mean(), optimizer)


def test_some_gradients_of_no_sync_that_are_dropped_by_hand_raise():
    expect_on_ranks(GradientError, "under `no_sync`.*dropped.*`optimizer.zero_grad\\(\\)`", drop_one_by_hand, 2)


def other_method_than_forward():
    """Run backward through a submodule; DDP's forward is not called."""
    _, model, optimizer = boost(TinyMLP())
    for step in range(3):
        model.first(own(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.unwrap().named_parameters()}


def test_backward_that_bypasses_forward_is_averaged_at_the_step():
    first, second = run_on_ranks(other_method_than_forward, 2)
    torch.manual_seed(0)
    reference = TinyMLP()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        reference.first(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in reference.named_parameters():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], parameter.detach(), msg=lambda text, name=name: f"{name}: {text}")


def backward_on_one_rank_only():
    _, model, optimizer = boost(TinyMLP(), find_unused_parameters=False)
    out = model(own())
    optimizer.backward(out.mean(), retain_graph=True)
    if dist.get_rank() == 0:
        optimizer.backward(out.square().mean())
    optimizer.step()


def test_extra_backward_on_one_rank_names_the_other_rank():
    with pytest.raises(RankError) as caught:
        run_on_ranks(backward_on_one_rank_only, 2, group_timeout_seconds=10)
    assert isinstance(caught.value.__cause__, MissingRanksError)
    assert "rank 1" in str(caught.value.__cause__)


def counted_reductions(**options):
    """Return how often gradients were averaged outside of DDP in steps that DDP averages completely."""
    booster, model, optimizer = boost(TinyMLP(), **options)
    for step in range(3):
        booster.backward(model(own(step)).square().mean(), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    calls = []
    model.gradients.average = lambda: calls.append(1)
    for step in range(3):
        with booster.no_sync(model):
            booster.backward(model(own(step)).square().mean(), optimizer)
        booster.backward(model(own(step)).square().mean(), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return len(calls)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_gradients_are_not_averaged_twice(options):
    assert run_on_ranks(counted_reductions, 2, **options) == [0, 0]
