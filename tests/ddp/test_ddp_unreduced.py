"""Gradients that DDP's reducer does not average are averaged at the step, or raise on every rank."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, noise
from driven_runs import Run, assert_same_loop
from ranked import raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError
from booster_ddp import TorchDDPPlugin
from booster_testing import run_on_ranks
from booster_testing.models import TinyMLP


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, sides="lr"):
        hidden = self.trunk(x).tanh()
        return tuple(layer(hidden) for side, layer in (("l", self.left), ("r", self.right)) if side in sides)


def squares(outs, _batch):
    return sum(out.square().mean() for out in outs)


ROWS = noise(4, 8)
CASE = Case(build=Heads, batch=ROWS, loss=squares)


def boost(model, **options):
    torch.manual_seed(0)
    booster = Booster("cpu", plugin=TorchDDPPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def own(step=0):
    return ROWS(step, dist.get_rank())


@raises_on_ranks(GradientError, "could not finish averaging.*find_unused_parameters=True", 2)
def test_synchronized_backward_through_other_parameters_than_under_no_sync_raises():
    booster, model, optimizer = boost(Heads())
    for sides in (("lr", "lr"), ("l", "r")):
        with booster.no_sync(model):
            booster.backward(sum(out.square().mean() for out in model(own(), sides[0])), optimizer)
        booster.backward(sum(out.square().mean() for out in model(own(), sides[1])), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@raises_on_ranks(
    GradientError, r"not in this backward.*'left\.bias'.*\. Run every forward and backward of the step under", 2
)
def test_the_search_is_not_advised_where_it_has_found_what_the_loss_leaves_out():
    booster, model, optimizer = boost(Heads(), find_unused_parameters=True)
    inputs = own().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs, "l")[0].sum(), inputs, create_graph=True)
    booster.backward(gradient.square().mean(), optimizer)
    optimizer.step()


def losses_of_two_heads(run, *, under_no_sync):
    for step in range(2):
        with run.no_sync() if under_no_sync else contextlib.nullcontext():
            outs = [run.model(x) for x in run.batches(step)]
            for side, retains in ((0, True), (1, False)):
                run.backward(torch.stack([out[side].square().mean() for out in outs]).mean(), retain_graph=retains)
        run.optimizer.step()
        run.optimizer.zero_grad()


ALL_USED = Setting(TorchDDPPlugin, {"find_unused_parameters": False})


@raises_on_ranks(GradientError, "all forward and backward passes.*`booster.no_sync`", 2)
def test_two_losses_that_share_some_parameters_raise_and_name_no_sync():
    losses_of_two_heads(Run(CASE, ALL_USED), under_no_sync=False)


def test_two_losses_that_share_some_parameters_are_averaged_under_no_sync():
    assert_same_loop(partial(losses_of_two_heads, under_no_sync=True), CASE, ALL_USED, own=True)


USES = {
    "stepped": [("lr", "lr")],
    "stepped twice": [("lr", "lr"), ("r", "lr")],
    "on one rank": [("lr", "l")],
    "dropped": [("lr", "lr")],
    "dropped by hand": [("lr", "lr")],
    "averaged and dropped": [("lr", "lr")],
}
"""What each rank uses in steps wholly under `no_sync`, by what becomes of their gradients."""


def sides_after(after):
    return {"left": ("l", "l"), "apart": ("l", "r"), "both": ("lr", "lr")}[after]


def run_steps(run, how, first, after):
    """Take steps under `no_sync`; note the step that follows them, and the one after.

    Args:
        run: What to train.
        how: What becomes of the gradients under `no_sync`.
        first: What both ranks use in the first step.
        after: What the ranks use after `no_sync`.
    """
    for step, sides in enumerate([(first, first), *USES[how], sides_after(after), ("lr", "lr")]):
        is_under_no_sync = 1 <= step <= len(USES[how])
        with run.no_sync() if is_under_no_sync else contextlib.nullcontext():
            run.backward(run.mean(step, lambda x, rank, sides=sides: squares(run.model(x, sides[rank]), x)))
        if not is_under_no_sync:
            run.step()
            continue
        if how == "averaged and dropped":
            run.clip(1.0)
        if "dropped" not in how:
            run.optimizer.step()
        if how == "dropped by hand":
            for parameter in run.net.parameters():
                parameter.grad = None
        else:
            run.optimizer.zero_grad()


def check_steps(options, how, after, first="lr"):
    loop = partial(run_steps, how=how, first=first, after=after)
    assert_same_loop(loop, CASE, Setting(TorchDDPPlugin, options), own=True)


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


SIDES = [(("l", "lr"), ("r", "r")), (("lr", "r"), ("l", "lr")), (("lr", "lr"), ("lr", "lr"))]
"""What each rank uses in the two forwards of a step."""


def two_forwards(run, *, together):
    """Run two forwards before the first backward, in which ranks use other parameters."""
    for step, sides in enumerate(SIDES):
        losses = [
            run.mean(2 * step + number, lambda x, rank, used=used: squares(run.model(x, used[rank]), x))
            for number, used in enumerate(sides)
        ]
        for loss in [sum(losses)] if together else losses:
            run.backward(loss)
        run.step()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("search", [True, None])
def test_forwards_before_the_first_backward_may_use_other_parameters_on_each_rank(search, together):
    setting = Setting(TorchDDPPlugin, {"find_unused_parameters": search})
    assert_same_loop(partial(two_forwards, together=together), CASE, setting, own=True)


@raises_on_ranks(GradientError, "under `no_sync`.*dropped.*`optimizer.zero_grad\\(\\)`", 2)
def test_some_gradients_of_no_sync_that_are_dropped_by_hand_raise():
    booster, model, optimizer = boost(Heads(), find_unused_parameters=True)
    with booster.no_sync(model):
        booster.backward(sum(out.square().mean() for out in model(own())), optimizer)
    model.unwrap().right.weight.grad = None
    booster.backward(model(own(), "l")[0].square().mean(), optimizer)


def other_method_than_forward(run):
    """Run backward through a submodule; DDP's forward is not called."""
    for step in range(3):
        run.mean(step, lambda x, _: run.net.first(x).square().mean()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_backward_that_bypasses_forward_is_averaged_at_the_step():
    case = Case(build=TinyMLP, batch=ROWS)
    assert_same_loop(other_method_than_forward, case, Setting(TorchDDPPlugin), own=True)


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
