"""torch's DDP is built again as training goes on: each parameter trains as in one process, and replicas stay equal."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, noise
from driven_runs import Run, assert_same_loop
from matrix import matrix, named
from ranked import raises_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core.errors import ConfigError, GradientError
from booster_ddp import TorchDDPPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for

WORLD_SIZE = 2
OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "search": {"find_unused_parameters": True},
    "search, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "no search": {"find_unused_parameters": False},
    "static": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}


class Net(nn.Module):
    """Three layers in a row, and two heads of which a caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x, heads="lr"):
        hidden = self.third(self.second(self.first(x).tanh()).tanh()).tanh()
        return self.out([layer(hidden) for key, layer in (("l", self.left), ("r", self.right)) if key in heads])

    def out(self, parts):
        return sum(parts)


class Box:
    """An output that pytree does not open."""

    def __init__(self, value) -> None:
        self.value = value


class Boxing(Net):
    def out(self, parts):
        return Box(sum(parts))


def net(kind=Net, frozen=()):
    model = kind().double()
    for name in frozen:
        model.get_submodule(name).requires_grad_(requires_grad=False)
    return model


def data(seed, rank):
    return noise(3, 6)(seed, rank).double()


def squares(out, _batch):
    return (out.value if isinstance(out, Box) else out).square().sum()


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def case_of(kind=Net, frozen=()):
    build, tolerance = partial(net, kind, frozen), tolerance_for(torch.float64)
    return Case(build=build, batch=data, loss=squares, optimizer=momentum, tolerance=tolerance)


def check(script, options, **changes):
    """Compare every gradient and parameter of each step with one process, and ranks with each other bit by bit."""
    assert_same_loop(script, case_of(**changes), Setting(TorchDDPPlugin, options, WORLD_SIZE), own=True)


def on_rank(options, **changes):
    return Run(case_of(**changes), Setting(TorchDDPPlugin, options), own=True)


def backward(run, seed, heads=("lr", "lr"), *, no_sync=False):
    """Run backward of a batch with the heads that each rank uses."""
    with run.no_sync() if no_sync else contextlib.nullcontext():
        run.backward(run.mean(seed, lambda x, rank: squares(run.model(x, heads[rank]), x)))


def finish(run):
    run.gradients()  # averages what is left to average
    run.step()


def accumulate_with_a_head_under_no_sync_only(run):
    for step in range(4):
        backward(run, 10 * step, ("lr", "lr"), no_sync=True)
        backward(run, 10 * step + 1, ("l", "l"))
        finish(run)


def accumulate_with_a_head_of_one_rank(run):
    for step in range(4):
        backward(run, 10 * step, ("lr", "l"), no_sync=True)
        backward(run, 10 * step + 1, ("l", "l"))
        finish(run)


SEARCHING = [name for name in OPTIONS if name not in ("no search", "static")]


@matrix(
    1,
    script=named([accumulate_with_a_head_under_no_sync_only, accumulate_with_a_head_of_one_rank], lambda f: f.__name__),
    options=SEARCHING,
)
def test_a_parameter_that_is_used_under_no_sync_only_is_averaged(script, options):
    check(script, OPTIONS[options])


def use_one_head_each(run):
    for step in range(4):
        backward(run, step, ("l", "r") if step != 2 else ("lr", "lr"))
        finish(run)


def use_both_heads(run):
    for step in range(4):
        backward(run, step)
        finish(run)


@matrix(1, options=SEARCHING)
def test_outputs_of_a_plain_class_are_averaged(options):
    check(use_one_head_each, OPTIONS[options], kind=Boxing)


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
    check(script, OPTIONS[options], frozen=LOWER if script is unfreeze_from_the_top else ())


def unfreeze_a_head_that_is_not_always_used(run):
    for step in range(6):
        run.net.right.requires_grad_(requires_grad=step >= 3)
        backward(run, step, ("lr", "l") if step >= 3 else ("lr", "lr"))
        finish(run)


def test_the_search_begins_again_with_other_parameters():
    check(unfreeze_a_head_that_is_not_always_used, {})


@raises_on_ranks(ConfigError, r"trained parameters.*Freeze and unfreeze the same parameters", WORLD_SIZE)
def test_ranks_that_train_different_parameters_raise():
    run = on_rank({}, frozen=LOWER)
    backward(run, 0)
    finish(run)
    layer = run.net.first if dist.get_rank() else run.net.second
    layer.requires_grad_(requires_grad=True)
    backward(run, 1)


@raises_on_ranks(
    GradientError, r"2 parameter\(s\) that were frozen in each forward.*'first.weight'.*before the forward", WORLD_SIZE
)
def test_gradients_that_no_forward_of_the_model_knows_raise():
    run = on_rank({}, frozen=LOWER)
    backward(run, 0)
    finish(run)
    run.net.first.requires_grad_(requires_grad=True)
    run.net.first(data(1, dist.get_rank())).sum().backward()
    run.optimizer.step()


def graph_of_an_earlier_ddp(run):
    """Run backward through a graph from before DDP was built again."""
    for step in range(3):
        old = run.loss(50 + step, heads="l")
        backward(run, step)
        finish(run)
        run.backward(old)
        backward(run, 10 + step)
        finish(run)


class OneLayer(nn.Module):
    """Whose backward needs no values that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x, heads="lr"):
        parts = [layer(x) for key, layer in (("l", self.left), ("r", self.right)) if key in heads]
        return torch.stack([part.sum() for part in parts]).sum().reshape(1) * x.mean()


@pytest.mark.parametrize("options", ["default", "no search", "views"])
def test_backward_through_the_graph_of_an_earlier_ddp_is_averaged(options):
    check(graph_of_an_earlier_ddp, OPTIONS[options], kind=OneLayer)


@raises_on_ranks(GradientError, r"first backward that is averaged.*`no_sync`", WORLD_SIZE)
def test_a_static_graph_that_begins_under_no_sync_is_refused():
    run = on_rank({"static_graph": True})
    backward(run, 0, no_sync=True)


def module_tree():
    run = on_rank({})
    names = [name for name, _ in run.model.named_modules()]
    for step in range(2):
        backward(run, step)
        finish(run)
    assert names == [name for name, _ in run.model.named_modules()]
    assert run.model.module is run.net
    assert list(run.model.module.state_dict()) == list(run.net.state_dict())
    return names


def test_the_module_is_the_users_and_ddp_is_outside_of_the_module_tree():
    expected = ["", *(f"module.{name}".removesuffix(".") for name, _ in net().named_modules())]
    assert run_on_ranks(module_tree, WORLD_SIZE) == [expected] * WORLD_SIZE


def move(run, at):
    """Before one of four steps, give the parameters other memory twice, as moves to the host and back do."""
    for step in range(4):
        if step == at:
            run.model.float().double()
        backward(run, step)
        finish(run)


@matrix(["default-0", "views-2", "no search-2", "static-0", "static-2"], options=OPTIONS, at=[0, 2])
def test_parameters_that_were_cast_and_cast_back_train_as_one_process(options, at):
    """Torch then hangs other nodes into the graph, which DDP's hooks are not on."""
    check(partial(move, at=at), OPTIONS[options])


class Reentrant(Net):
    def forward(self, x, heads="lr"):
        return checkpoint(super().forward, x.clone().requires_grad_(), heads, use_reentrant=True)


@matrix(["default", "views"], options=["default", "views", "no search"])
def test_reentrant_checkpointing_trains_as_one_process(options):
    """The search of the first step does not see what is checkpointed so."""
    check(use_both_heads, OPTIONS[options], kind=Reentrant)
