"""torch's DDP is built again as training goes on: each parameter trains as in one process, and replicas stay equal."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from matrix import matrix, named
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_ddp import TorchDDPPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for

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
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
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


def net(kind=Net):
    torch.manual_seed(0)
    return kind().double()


def data(seed, rank):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def loss_of(out):
    return (out.value if isinstance(out, Box) else out).square().sum()


class OneProcess:
    """Trains on the batches of all ranks."""

    ranks = range(WORLD_SIZE)

    def __init__(self, kind=Net, optimizer="sgd") -> None:
        self.net = self.model = net(kind)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.steps = []

    def backward(self, seed, heads=("lr", "lr"), *, no_sync=False):
        for rank in self.ranks:
            with self.no_sync() if no_sync else contextlib.nullcontext():
                self.run_backward(loss_of(self.model(data(seed, rank), heads[rank])))

    def no_sync(self):
        return contextlib.nullcontext()

    def run_backward(self, loss):
        (loss / WORLD_SIZE).backward()

    def finish_gradients(self):
        """Average what is to be averaged, as `full_gradient` does."""

    def step(self):
        self.finish_gradients()
        gradients = {f"{name}.grad": p.grad.clone() for name, p in self.net.named_parameters() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append(gradients | {name: p.detach().clone() for name, p in self.net.named_parameters()})


class OnRank(OneProcess):
    """Trains on this rank's batches under the plugin."""

    def __init__(self, options, kind=Net, optimizer="sgd", prepare=None) -> None:
        super().__init__(kind, optimizer)
        if prepare is not None:
            prepare(self)
        self.ranks = [dist.get_rank()]
        self.booster = Booster("cpu", plugin=TorchDDPPlugin(**options))
        self.model, self.optimizer, *_ = self.booster.boost(self.net, self.optimizer)

    def no_sync(self):
        return self.booster.no_sync(self.model, self.optimizer)

    def run_backward(self, loss):
        self.booster.backward(loss, self.optimizer)

    def finish_gradients(self):
        self.optimizer.settle()


def trained_on_rank(script, options, kind, optimizer, prepare):
    run = OnRank(options, kind, optimizer, prepare)
    script(run)
    return run.steps


def check(script, options, *, kind=Net, optimizer="sgd", prepare=None):
    """Compare every gradient and parameter of each step with one process, and ranks with each other bit by bit."""
    plain = OneProcess(kind, optimizer)
    if prepare is not None:
        prepare(plain)
    script(plain)
    first, *others = run_on_ranks(trained_on_rank, WORLD_SIZE, script, options, kind, optimizer, prepare)
    for ours, theirs in zip(first, plain.steps, strict=True):
        assert_same_tensors(ours, theirs, tolerance_for(torch.float64))
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def accumulate_with_a_head_under_no_sync_only(run):
    for step in range(4):
        run.backward(10 * step, ("lr", "lr"), no_sync=True)
        run.backward(10 * step + 1, ("l", "l"))
        run.step()


def accumulate_with_a_head_of_one_rank(run):
    for step in range(4):
        run.backward(10 * step, ("lr", "l"), no_sync=True)
        run.backward(10 * step + 1, ("l", "l"))
        run.step()


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
        run.backward(step, ("l", "r") if step != 2 else ("lr", "lr"))
        run.step()


def use_both_heads(run):
    for step in range(4):
        run.backward(step)
        run.step()


@matrix(1, script=named([use_one_head_each, use_both_heads], lambda f: f.__name__), options=SEARCHING)
def test_outputs_of_a_plain_class_are_averaged(script, options):
    check(script, OPTIONS[options], kind=Boxing)


def freeze_lower_layers(run):
    for layer in (run.net.first, run.net.second):
        layer.requires_grad_(requires_grad=False)


def unfreeze_from_the_top(run):
    for step in range(7):
        if step == 2:
            run.net.second.requires_grad_(requires_grad=True)
        if step == 5:
            run.net.first.requires_grad_(requires_grad=True)
        run.backward(step)
        run.step()


def take_turns(run):
    for step in range(6):
        for index, layer in enumerate((run.net.first, run.net.second)):
            layer.requires_grad_(requires_grad=step % 2 == index)
        run.backward(step)
        run.step()


def freeze_and_unfreeze_all_but_a_bias(run):
    for step in range(6):
        for name, parameter in run.net.named_parameters():
            parameter.requires_grad_(requires_grad=step not in (2, 3) or name == "left.bias")
        run.backward(step)
        run.step()


def freeze_within_a_step(run):
    """Freeze a layer whose gradients of this step are still each rank's own."""
    for step in range(4):
        run.net.first.requires_grad_(requires_grad=True)
        run.backward(10 * step)  # so that a static graph begins with a whole backward
        run.backward(10 * step + 1, no_sync=True)
        run.net.first.requires_grad_(requires_grad=step % 2 == 0)
        run.backward(10 * step + 2)
        run.step()


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


@matrix(1, script=named(SCHEDULES, lambda f: f.__name__), options=OPTIONS, optimizer=OPTIMIZERS)
def test_freezing_and_unfreezing_trains_as_one_process(script, options, optimizer):
    prepare = freeze_lower_layers if script is unfreeze_from_the_top else None
    check(script, OPTIONS[options], optimizer=optimizer, prepare=prepare)


def unfreeze_a_head_that_is_not_always_used(run):
    for step in range(6):
        run.net.right.requires_grad_(requires_grad=step >= 3)
        run.backward(step, ("lr", "l") if step >= 3 else ("lr", "lr"))
        run.step()


def test_the_search_begins_again_with_other_parameters():
    check(unfreeze_a_head_that_is_not_always_used, {})


def unfreeze_on_one_rank():
    run = OnRank({}, prepare=freeze_lower_layers)
    run.backward(0)
    run.step()
    layer = run.net.first if dist.get_rank() else run.net.second
    layer.requires_grad_(requires_grad=True)
    run.backward(1)


def test_ranks_that_train_different_parameters_raise():
    expect_on_ranks(
        ConfigError, r"trained parameters.*Freeze and unfreeze the same parameters", unfreeze_on_one_rank, WORLD_SIZE
    )


def unfreeze_past_forward():
    run = OnRank({}, prepare=freeze_lower_layers)
    run.backward(0)
    run.step()
    run.net.first.requires_grad_(requires_grad=True)
    run.net.first(data(1, dist.get_rank())).sum().backward()
    run.optimizer.step()


def test_gradients_that_no_forward_of_the_model_knows_raise():
    match = r"2 parameter\(s\) that were frozen in each forward.*'first.weight'.*before the forward"
    expect_on_ranks(GradientError, match, unfreeze_past_forward, WORLD_SIZE)


def graph_of_an_earlier_ddp(run):
    """Run backward through a graph from before DDP was built again."""
    for step in range(3):
        old = [loss_of(run.model(data(50 + step, rank), "l")) for rank in run.ranks]
        run.backward(step)
        run.step()
        for loss in old:
            run.run_backward(loss)
        run.backward(10 + step)
        run.step()


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


def begin_under_no_sync():
    run = OnRank({"static_graph": True})
    run.backward(0, no_sync=True)


def test_a_static_graph_that_begins_under_no_sync_is_refused():
    expect_on_ranks(GradientError, r"first backward that is averaged.*`no_sync`", begin_under_no_sync, WORLD_SIZE)


def module_tree():
    run = OnRank({})
    names = [name for name, _ in run.model.named_modules()]
    for step in range(2):
        run.backward(step)
        run.step()
    assert names == [name for name, _ in run.model.named_modules()]
    assert run.model.module is run.net
    assert list(run.model.module.state_dict()) == list(run.net.state_dict())
    return names


def test_the_module_is_the_users_and_ddp_is_outside_of_the_module_tree():
    expected = ["", *(f"module.{name}".removesuffix(".") for name, _ in net().named_modules())]
    assert run_on_ranks(module_tree, WORLD_SIZE) == [expected] * WORLD_SIZE
