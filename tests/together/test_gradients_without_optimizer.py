"""A gradient that no optimizer of the strategy knows of raises; without gradients a model needs no optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from matrix import matrix, named
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "fsdp": lambda: TorchFSDPPlugin(unit_classes=["Linear"]),
    "fsdp, one replicated": lambda: TorchFSDPPlugin(ignored_modules=["0"]),
    "zero": LowLevelZeroPlugin,
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=256),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1),
    "hybrid zero": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1),
    "hybrid zero3": lambda: HybridParallelPlugin(zero_stage=3),
}
CLOSE = tolerance_for(torch.float32)


def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def train_with_a_late_optimizer(name, *, frozen):
    model = make().requires_grad_(requires_grad=not frozen)
    model = Booster("cpu", plugin=PLUGINS[name]()).boost(model).model
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(dist.get_rank())).square().mean().backward()
    optimizer.step()


@matrix(
    [
        "trained-zero",
        "trained-hybrid",
        "trained-fsdp",
        "trained-fsdp, one replicated",
        "unfrozen after boost-fsdp",
        "unfrozen after boost-gemini",
        "unfrozen after boost-hybrid zero",
    ],
    frozen=named([False, True], ["trained", "unfrozen after boost"]),
    name=PLUGINS,
)
def test_a_model_boosted_without_an_optimizer_does_not_train(name, frozen):
    match = "got a gradient, but the model was boosted without an optimizer.*Pass the optimizer to `boost`"
    expect_on_ranks(GradientError, match, train_with_a_late_optimizer, 2, name, frozen=frozen)


def use_without_gradients(name):
    expected, x = make(), batch()
    booster = Booster("cpu", plugin=PLUGINS[name]())
    model = booster.boost(make()).model
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
    assert torch.equal(model(x), expected(x)), "the graph is made, and not run"
    frozen = Booster("cpu", plugin=PLUGINS[name]()).boost(make().requires_grad_(requires_grad=False)).model
    seen, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    frozen(seen).square().sum().backward()
    expected(plain).square().sum().backward()
    assert_same_tensors({"x": seen.grad}, {"x": plain.grad}, CLOSE)
    (through,) = torch.autograd.grad(model(seen).square().sum(), seen)
    assert_same_tensors({"x": through}, {"x": plain.grad}, CLOSE)


@matrix(["fsdp", "zero", "gemini", "hybrid", "hybrid zero"], name=PLUGINS)
def test_without_gradients_of_parameters_no_optimizer_is_needed(name):
    run_on_ranks(use_without_gradients, 2, name)


def teach(name):
    """A teacher that nobody froze, whose output is cut from the graph."""
    booster = Booster("cpu", plugin=PLUGINS[name]())
    teacher = booster.boost(make()).model
    student = make()
    student, optimizer, *_ = booster.boost(student, torch.optim.SGD(student.parameters(), lr=0.1))
    x = batch(dist.get_rank())
    booster.backward((student(x) - 2 * teacher(x).detach()).square().mean(), optimizer)
    optimizer.step()


@matrix(["fsdp", "zero", "gemini", "hybrid", "hybrid zero"], name=PLUGINS)
def test_a_teacher_needs_no_optimizer(name):
    run_on_ranks(teach, 2, name)


def train_plainly(frozen_steps, size):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(requires_grad=False)
    for step in range(4):
        if step == frozen_steps:
            model[0].requires_grad_(requires_grad=True)
        torch.cat([model(batch(10 * step + rank)) for rank in range(size)]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def unfreeze(name, how, precision=None):
    net = make()
    net[0].requires_grad_(requires_grad=False)
    held = net.parameters() if how == "held" else [p for p in net.parameters() if p.requires_grad]
    booster = Booster("cpu", precision, PLUGINS[name]())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(held, lr=0.1))
    for step in range(4):
        if step == 2:
            net[0].requires_grad_(requires_grad=True)
            if how == "added":
                optimizer.add_param_group({"params": list(net[0].parameters())})
        booster.backward(model(batch(10 * step + dist.get_rank())).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if name in ("gemini", "hybrid zero3"):
        return model.state_dict()
    if name.startswith("fsdp"):
        return whole_model(booster, model)
    return {key: parameter.detach().clone() for key, parameter in net.named_parameters()}


@matrix(1, how=["held", "added"], name=PLUGINS)
def test_a_parameter_that_the_optimizer_holds_trains_once_it_is_unfrozen(name, how):
    expected = train_plainly(2, 2)
    for actual in run_on_ranks(unfreeze, 2, name, how):
        assert_same_tensors(actual, expected, CLOSE)


@matrix(1, precision=["fp32", "bf16"], name=PLUGINS)
def test_a_parameter_that_no_group_holds_raises_once_it_is_unfrozen(name, precision):
    match = r"Parameter '0\.(weight|bias)' got a gradient, but it was frozen at `boost`.*add_param_group"
    if name.startswith("fsdp"):
        match = r"2 parameters that were frozen at `boost` require gradients now, such as '0\.(weight|bias)'"
    expect_on_ranks(GradientError, match, unfreeze, 2, name, "left out", precision)
