"""Gradients that DDP's reducer does not average, or a DDP that is built again: as in one process, or raised.

Every gradient and parameter of each step is compared with one process, and ranks with each other bit by bit.
"""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, noise
from driven_runs import Run, assert_same_loop, same_loop
from matrix import matrix, named
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core.errors import ConfigError, GradientError
from booster_ddp import TorchDDPPlugin
from booster_testing.compare import tolerance_for

OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "search": {"find_unused_parameters": True},
    "search, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "no search": {"find_unused_parameters": False},
    "static": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
SEARCHING = [name for name in OPTIONS if name not in ("no search", "static")]


class Net(nn.Module):
    """Three layers in a row, and two heads of which a caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x, heads="lr"):
        hidden = self.third(self.second(self.first(x).tanh()).tanh()).tanh()
        return tuple(layer(hidden) for key, layer in (("l", self.left), ("r", self.right)) if key in heads)


class Box:
    """An output that pytree does not open."""

    def __init__(self, value) -> None:
        self.value = value


class Boxing(Net):
    def forward(self, x, heads="lr"):
        return Box(super().forward(x, heads))


class Reentrant(Net):
    def forward(self, x, heads="lr"):
        return checkpoint(super().forward, x.clone().requires_grad_(), heads, use_reentrant=True)


class OneLayer(nn.Module):
    """Whose backward needs no values that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x, heads="lr"):
        parts = [layer(x) for key, layer in (("l", self.left), ("r", self.right)) if key in heads]
        return [torch.stack([part.sum() for part in parts]).sum() * x.mean()]


def net(kind=Net, frozen=()):
    model = kind().double()
    for name in frozen:
        model.get_submodule(name).requires_grad_(requires_grad=False)
    return model


def data(seed, rank):
    return noise(3, 6)(seed, rank).double()


def squares(outs, _batch=None):
    return sum(out.square().sum() for out in (outs.value if isinstance(outs, Box) else outs))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def case_of(**changes):
    tolerance = tolerance_for(torch.float64)
    return Case(build=partial(net, **changes), batch=data, loss=squares, optimizer=momentum, tolerance=tolerance)


def under(options):
    return Setting(TorchDDPPlugin, OPTIONS[options])


def as_one_process(setting=under, **changes):
    """Let a test be a loop that trains under options as in one process, by default those of its parameter."""
    return same_loop(case_of(**changes), setting, own=True)


def on_rank(options, **changes):
    return Run(case_of(**changes), Setting(TorchDDPPlugin, options), own=True)


def loss_of(run, seed, heads=("lr", "lr")):
    """Return the loss of a batch with the heads that each rank uses."""
    return run.mean(seed, lambda x, rank: squares(run.model(x, heads[rank])))


def backward(run, seed, heads=("lr", "lr"), *, no_sync=False):
    with run.no_sync() if no_sync else contextlib.nullcontext():
        run.backward(loss_of(run, seed, heads))


def finish(run):
    run.gradients()  # averages what is left to average
    run.step()


# ---- steps under `no_sync`, of which DDP's reducer knows nothing

USES = {
    "stepped": [("lr", "lr")],
    "stepped twice": [("lr", "lr"), ("r", "lr")],
    "on one rank": [("lr", "l")],
    "dropped": [("lr", "lr")],
    "dropped by hand": [("lr", "lr")],
    "averaged and dropped": [("lr", "lr")],
}
"""What each rank uses in steps wholly under `no_sync`, by what becomes of their gradients."""
AFTER = {"left": ("l", "l"), "apart": ("l", "r"), "both": ("lr", "lr")}


def run_steps(run, how, after, first="lr"):
    """Take steps under `no_sync`; note the step that follows them, and the one after.

    Args:
        run: What to train.
        how: What becomes of the gradients under `no_sync`.
        after: What the ranks use after `no_sync`.
        first: What both ranks use in the first step.
    """
    for step, heads in enumerate([(first, first), *USES[how], AFTER[after], ("lr", "lr")]):
        is_under_no_sync = 1 <= step <= len(USES[how])
        backward(run, step, heads, no_sync=is_under_no_sync)
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


@pytest.mark.parametrize("after", ["left", "apart"])
@pytest.mark.parametrize("how", USES)
@as_one_process(under("search"))
def test_a_step_under_no_sync_and_one_that_leaves_parameters_out(run, how, after):
    run_steps(run, how, after)


@pytest.mark.parametrize("options", ["search, views", "default"])
@pytest.mark.parametrize("how", ["stepped", "dropped"])
@as_one_process()
def test_a_step_under_no_sync_with_other_options(run, how):
    run_steps(run, how, "left", first="l")  # so that the first step decides on a search


@pytest.mark.parametrize("how", USES)
@as_one_process(under("no search"))
def test_a_step_under_no_sync_where_no_parameter_is_searched_for(run, how):
    run_steps(run, how, "both")


@matrix(1, heads=named([("lr", "lr"), ("lr", "l")], ["of all ranks", "of one rank"]), options=SEARCHING)
@as_one_process()
def test_a_parameter_that_is_used_under_no_sync_only_is_averaged(run, heads):
    for step in range(4):
        backward(run, 10 * step, heads, no_sync=True)
        backward(run, 10 * step + 1, ("l", "l"))
        finish(run)


@raises_on_ranks(GradientError, "could not finish averaging.*find_unused_parameters=True", 2)
def test_synchronized_backward_through_other_parameters_than_under_no_sync_raises():
    run = on_rank({})
    for under_no_sync, after in (("lr", "lr"), ("l", "r")):
        backward(run, 0, (under_no_sync,) * 2, no_sync=True)
        backward(run, 0, (after,) * 2)
        run.step()


@raises_on_ranks(GradientError, "under `no_sync`.*dropped.*`optimizer.zero_grad\\(\\)`", 2)
def test_some_gradients_of_no_sync_that_are_dropped_by_hand_raise():
    run = on_rank(OPTIONS["search"])
    backward(run, 0, no_sync=True)
    run.net.right.weight.grad = None
    backward(run, 0, ("l", "l"))


@raises_on_ranks(GradientError, r"first backward that is averaged.*`no_sync`", 2)
def test_a_static_graph_that_begins_under_no_sync_is_refused():
    backward(on_rank(OPTIONS["static"]), 0, no_sync=True)


# ---- several losses and forwards, and what DDP does not see


def losses_of_two_heads(run, *, under_no_sync):
    for step in range(2):
        with run.no_sync() if under_no_sync else contextlib.nullcontext():
            outs = [run.model(x) for x in run.batches(step)]
            for head, retains in ((0, True), (1, False)):
                run.backward(torch.stack([out[head].square().mean() for out in outs]).mean(), retain_graph=retains)
        run.optimizer.step()
        run.optimizer.zero_grad()


@raises_on_ranks(GradientError, "all forward and backward passes.*`booster.no_sync`", 2)
def test_two_losses_that_share_some_parameters_raise_and_name_no_sync():
    losses_of_two_heads(on_rank(OPTIONS["no search"]), under_no_sync=False)


@as_one_process(under("no search"))
def test_two_losses_that_share_some_parameters_are_averaged_under_no_sync(run):
    losses_of_two_heads(run, under_no_sync=True)


@raises_on_ranks(
    GradientError, r"not in this backward.*'left\.bias'.*\. Run every forward and backward of the step under", 2
)
def test_the_search_is_not_advised_where_it_has_found_what_the_loss_leaves_out():
    run = on_rank(OPTIONS["search"])
    inputs = data(0, dist.get_rank()).requires_grad_()
    (gradient,) = torch.autograd.grad(run.model(inputs, "l")[0].sum(), inputs, create_graph=True)
    run.backward(gradient.square().mean())
    run.step()


HEADS = [(("l", "lr"), ("r", "r")), (("lr", "r"), ("l", "lr")), (("lr", "lr"), ("lr", "lr"))]
"""What each rank uses in the two forwards of a step."""


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("options", ["search", "default"])
@as_one_process()
def test_forwards_before_the_first_backward_may_use_other_parameters_on_each_rank(run, together):
    for step, heads in enumerate(HEADS):
        losses = [loss_of(run, 2 * step + number, used) for number, used in enumerate(heads)]
        for loss in [sum(losses)] if together else losses:
            run.backward(loss)
        run.step()


@as_one_process(under("default"))
def test_backward_that_bypasses_forward_is_averaged_at_the_step(run):
    """Backward goes through a submodule; DDP's forward is not called."""
    for step in range(3):
        run.mean(step, lambda x, _: run.net.first(x).square().mean()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("options", ["default", "no search", "views"])
@as_one_process(kind=OneLayer)
def test_backward_through_the_graph_of_an_earlier_ddp_is_averaged(run):
    """The graph is from before DDP was built again."""
    for step in range(3):
        old = loss_of(run, 50 + step, ("l", "l"))
        backward(run, step)
        finish(run)
        run.backward(old)
        backward(run, 10 + step)
        finish(run)


@matrix(1, options=SEARCHING)
@as_one_process(kind=Boxing)
def test_outputs_of_a_plain_class_are_averaged(run):
    for step in range(4):
        backward(run, step, ("l", "r") if step != 2 else ("lr", "lr"))
        finish(run)


def use_both_heads(run):
    for step in range(4):
        backward(run, step)
        finish(run)


@matrix(["default", "views"], options=["default", "views", "no search"])
@as_one_process(kind=Reentrant)
def test_reentrant_checkpointing_trains_as_one_process(run):
    """The search of the first step does not see what is checkpointed so."""
    use_both_heads(run)


@pytest.mark.parametrize("options", ["default", "search", "static"])
@on_ranks(2)
def test_gradients_are_not_averaged_twice(options):
    """DDP averages all in each step, and nothing is averaged outside of it."""
    run = on_rank(OPTIONS[options])
    for step in range(6):
        if step == 3:
            run.model.gradients.average = mock.Mock()
        if step >= 3:
            backward(run, step, no_sync=True)
        backward(run, step)
        run.clip(1.0)
        run.step()
    run.model.gradients.average.assert_not_called()


# ---- parameters that are frozen, unfrozen and moved, for which DDP is built again

LOWER = ("first", "second")


def unfreeze_from_the_top(run):
    for step in range(7):
        if step == 2:
            run.net.second.requires_grad_(requires_grad=True)
        if step == 5:
            run.net.first.requires_grad_(requires_grad=True)
        backward(run, step)
        finish(run)


def take_turns(run):
    for step in range(6):
        for index, layer in enumerate((run.net.first, run.net.second)):
            layer.requires_grad_(requires_grad=step % 2 == index)
        backward(run, step)
        finish(run)


def freeze_and_unfreeze_all_but_a_bias(run):
    for step in range(6):
        for name, parameter in run.net.named_parameters():
            parameter.requires_grad_(requires_grad=step not in (2, 3) or name == "left.bias")
        backward(run, step)
        finish(run)


def freeze_within_a_step(run):
    """Freeze a layer whose gradients of this step are still each rank's own."""
    for step in range(4):
        run.net.first.requires_grad_(requires_grad=True)
        backward(run, 10 * step)  # so that a static graph begins with a whole backward
        backward(run, 10 * step + 1, no_sync=True)
        run.net.first.requires_grad_(requires_grad=step % 2 == 0)
        backward(run, 10 * step + 2)
        finish(run)


def unfreeze_everything_later(run):
    """Begin without anything to train."""
    run.net.requires_grad_(requires_grad=False)
    run.model(data(0, 0))
    run.net.requires_grad_(requires_grad=True)
    use_both_heads(run)


SCHEDULES = [
    unfreeze_from_the_top,
    take_turns,
    freeze_and_unfreeze_all_but_a_bias,
    freeze_within_a_step,
    unfreeze_everything_later,
]


@matrix(1, script=named(SCHEDULES, lambda f: f.__name__), options=OPTIONS)
def test_freezing_and_unfreezing_trains_as_one_process(script, options):
    frozen = LOWER if script is unfreeze_from_the_top else ()
    assert_same_loop(script, case_of(frozen=frozen), under(options), own=True)


@as_one_process(under("default"))
def test_the_search_begins_again_with_other_parameters(run):
    """A head that is not always used is unfrozen."""
    for step in range(6):
        run.net.right.requires_grad_(requires_grad=step >= 3)
        backward(run, step, ("lr", "l") if step >= 3 else ("lr", "lr"))
        finish(run)


def first_step(options, **changes):
    run = on_rank(options, **changes)
    backward(run, 0)
    finish(run)
    return run


@raises_on_ranks(ConfigError, r"trained parameters.*Freeze and unfreeze the same parameters", 2)
def test_ranks_that_train_different_parameters_raise():
    run = first_step({}, frozen=LOWER)
    layer = run.net.first if dist.get_rank() else run.net.second
    layer.requires_grad_(requires_grad=True)
    backward(run, 1)


@raises_on_ranks(
    GradientError, r"2 parameter\(s\) that were frozen in each forward.*'first.weight'.*before the forward", 2
)
def test_gradients_that_no_forward_of_the_model_knows_raise():
    run = first_step({}, frozen=LOWER)
    run.net.first.requires_grad_(requires_grad=True)
    run.net.first(data(1, dist.get_rank())).sum().backward()
    run.optimizer.step()


@on_ranks(2)
def test_the_module_is_the_users_and_ddp_is_outside_of_the_module_tree():
    run = on_rank({})
    expected = ["", *(f"module.{name}".removesuffix(".") for name, _ in net().named_modules())]
    for step in range(2):
        assert [name for name, _ in run.model.named_modules()] == expected
        backward(run, step)
        finish(run)
    assert [name for name, _ in run.model.named_modules()] == expected
    assert run.model.module is run.net
    assert list(run.model.module.state_dict()) == list(run.net.state_dict())


@matrix(["default-0", "views-2", "no search-2", "static-0", "static-2"], options=OPTIONS, at=[0, 2])
@as_one_process()
def test_parameters_that_were_cast_and_cast_back_train_as_one_process(run, at):
    """Before one of four steps; torch then hangs other nodes into the graph, which DDP's hooks are not on."""
    for step in range(4):
        if step == at:
            run.model.float().double()
        backward(run, step)
        finish(run)


# ---- gradients that a script assigns to ``parameter.grad``, and values that it writes to parameters


def computes_them(run):
    """Gradient surgery: each task's gradient by `torch.autograd.grad`, and a sum of them in place of backward."""
    parameters = list(run.net.parameters())
    for step in range(3):
        tasks = [torch.autograd.grad(run.loss(10 * step + task), parameters) for task in range(2)]
        for parameter, first, second in zip(parameters, *tasks, strict=True):
            parameter.grad = first + 0.5 * second
        run.step()


def replaces_one(run):
    """One gradient of a backward is replaced by one of this rank's own samples."""
    weight = run.net.left.weight
    for step in range(3):
        (own,) = torch.autograd.grad(run.loss(10 + step), [weight])
        run.backward(run.loss(step))
        weight.grad = own
        run.step()


def takes_turns_with_backward(run):
    """Steps of backward and of gradients by hand, whose memory may be where others' was."""
    parameters = list(run.net.parameters())
    for step in range(4):
        if step % 2:
            for parameter, own in zip(parameters, torch.autograd.grad(run.loss(step), parameters), strict=True):
                parameter.grad = own
        else:
            run.backward(run.loss(step))
        run.step()


LOOPS = [computes_them, replaces_one, takes_turns_with_backward]


@matrix(1, options=["default", "views", "search", "static"], loop=named(LOOPS, lambda f: f.__name__))
def test_they_are_averaged(options, loop):
    assert_same_loop(loop, case_of(), under(options))


@same_loop(case_of(), Setting(TorchDDPPlugin))
def test_equal_values_are_those_of_one_process(run):
    """A layer is reset, by a generator that all ranks have alike, and frozen; values are loaded."""
    generator = torch.Generator().manual_seed(5)
    for step in range(5):
        if step == 2:
            nn.init.normal_(run.net.left.weight, generator=generator)
        if step == 3:
            run.net.left.requires_grad_(False)
            run.net.load_state_dict({name: 0.5 * value for name, value in run.net.state_dict().items()})
        run.backward(run.loss(step))
        run.step()
