"""Scripts that read, clip or drop ``parameter.grad`` under strategies that split gradients: right, or a clear error."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, noise
from driven_runs import Run, assert_same_steps, drive
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core.errors import GradientError
from booster_ddp import TorchDDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero 1": lambda: LowLevelZeroPlugin(stage=1, bucket_bytes=200),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, bucket_bytes=200),
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=256),
    "gemini, one rank each": lambda: GeminiPlugin(min_chunk_bytes=256, replica_size=2),
    "hybrid, zero 0": lambda: HybridParallelPlugin(zero_stage=0),
    "hybrid, zero 1": lambda: HybridParallelPlugin(zero_stage=1),
    "hybrid, zero3": lambda: HybridParallelPlugin(zero_stage=3),
}
SOME = ["zero 1", "gemini", "hybrid, zero 0"]


class Net(nn.Module):
    """A trunk, a head, and a branch that only some batches reach."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.branch = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x, branch=True):
        x = self.trunk(x)
        return self.head(x + self.branch(x) if branch else x)


def decaying(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)


CASE = Case(build=Net, batch=noise(4, 6), optimizer=decaying)


def boosted(plugin):
    return Run(CASE, Setting(PLUGINS[plugin]))


# ---- reading raises

READS = {
    "clip_grad_norm_": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0),
    "clip_grad_norm_, foreach": lambda run: nn.utils.clip_grad_norm_(run.net.parameters(), 1.0, foreach=True),
    "clip_grad_value_": lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 1.0),
    "norm": lambda run: run.net.head.weight.grad.norm(2).item(),
    "norm of data": lambda run: run.net.head.weight.grad.data.norm(2),
    "norm, detached": lambda run: torch.linalg.vector_norm(run.net.head.weight.grad.detach()),
    "any NaN": lambda run: torch.isnan(run.net.head.weight.grad).any(),
    "scaled in place": lambda run: run.net.head.weight.grad.mul_(0.5),
    "divided": lambda run: run.net.head.weight.grad / 2,
    "noise": lambda run: run.net.head.weight.grad.add_(torch.randn(3, 6)),
    "indexed": lambda run: run.net.head.weight.grad[0],
    "written to": lambda run: run.net.head.weight.grad.__setitem__(0, 0.0),
    "to numpy": lambda run: run.net.head.weight.grad.numpy(),
    "to a list": lambda run: run.net.head.weight.grad.tolist(),
    "to the host": lambda run: run.net.head.weight.grad.cpu(),
    "cloned": lambda run: run.net.head.weight.grad.clone(),
    "copied": lambda run: copy.deepcopy(run.net.head.weight.grad),
    "copied from": lambda run: torch.empty(3, 6).copy_(run.net.head.weight.grad),
    "pickled": lambda run: pickle.dumps(run.net.head.weight.grad),
    "as a truth value": lambda run: bool(run.net.head.bias.grad.sum() > 0),
    "sent": lambda run: dist.all_reduce(run.net.head.weight.grad),
    "concatenated": lambda run: torch.cat([p.grad.flatten() for p in run.net.parameters()]),
    "converted": lambda run: run.net.head.weight.grad.double(),
    "compared": lambda run: torch.equal(run.net.head.weight.grad, torch.ones(3, 6)),
    "many": lambda run: torch._foreach_mul_([run.net.head.weight.grad], 2),
    **{name: lambda run, name=name: getattr(run.net.head.weight.grad, name) for name in ("T", "mT", "H", "mH")},
    **{name: lambda run, name=name: getattr(run.net.head.weight.grad, name) for name in ("real", "imag")},
    "pieces": lambda run: nn.utils.clip_grad_norm_([p for g in run.optimizer.param_groups for p in g["params"]], 1.0),
}


@matrix(
    ["zero 1", "zero 2", "gemini", "gemini, one rank each", "hybrid, zero 0", "hybrid, zero 1"], plugin=list(PLUGINS)
)
@on_ranks(2)
def test_reading_a_split_gradient_raises_with_the_remedy(plugin):
    run = boosted(plugin)
    for settles in (False, True):
        run.backward(run.loss(0))
        if settles:
            run.clip(0.1)
        for read in READS.values():
            with pytest.raises(GradientError, match=r"`optimizer\.clip_grad_by_norm\(max_norm\)`") as caught:
                read(run)
            assert "`booster_runtime.full_gradient(booster, model, '" in str(caught.value)
    gradient = run.net.head.weight.grad
    said = tuple(gradient.shape), gradient.dtype, gradient.device.type, gradient.requires_grad, gradient.numel()
    assert said == ((3, 6), torch.float32, "cpu", False, 18)
    assert (len(gradient), gradient.size(1), gradient.ndim, torch.numel(gradient)) == (3, 6, 2, 18)
    assert (gradient.is_floating_point(), torch.is_complex(gradient), gradient.is_sparse) == (True, False, False)
    assert (gradient.stride(), gradient.layout, gradient.element_size()) == ((6, 1), torch.strided, 4)
    assert repr(gradient) == f"{gradient}" == "ShardedGradient('head.weight', shape=(3, 6), dtype=torch.float32)"


# whose ranks use the same ones
@matrix(
    ["zero 1", "zero 2", "gemini, one rank each", "hybrid, zero 0", "hybrid, zero 1"],
    plugin=[name for name in PLUGINS if name != "gemini"],
)
@on_ranks(2)
def test_parameters_have_gradients_where_they_have_some_in_one_process(plugin):
    """Look after backward, after clipping, after the step and after `zero_grad`."""
    run, rank = boosted(plugin), dist.get_rank()
    every = sorted(name for name, _ in Net().named_parameters())

    def present():
        return sorted(name for name, p in run.model.named_parameters() if p.grad is not None)

    assert present() == []
    run.backward(run.loss(0, branch=rank == 1))
    assert present() == [name for name in every if rank == 1 or "branch" not in name]
    run.clip(0.1)
    assert present() == every
    run.optimizer.step()
    assert present() == every
    run.optimizer.zero_grad()
    assert present() == []


# ---- what can't be honoured


@pytest.mark.parametrize("plugin", SOME)
@on_ranks(2)
def test_a_hook_after_boost_sees_that_there_is_a_gradient_that_it_can_not_read(plugin):
    run = boosted(plugin)
    seen = []

    def look(parameter):
        with pytest.raises(GradientError, match=r"The gradient of 'head.weight' is split over the ranks"):
            parameter.grad.norm()
        seen.append(parameter.grad is not None)

    run.net.head.weight.register_post_accumulate_grad_hook(look)
    run.backward(run.loss(0))
    run.loss(1).backward()
    assert seen == [True, True]


# ---- hooks that change gradients before ranks average them


def in_place(change):
    def hook(parameter):
        change(parameter.grad)

    return hook


def step_at_once(parameter):
    torch.optim.SGD([parameter], 0.1).step()
    parameter.grad = None


LINEAR = {
    "factor": lambda g: 3 * g,
    "constant": lambda g: g + 0.1,
    "mask": lambda g: g * (torch.arange(g.numel()).view(g.shape) % 2),
    "centralized": lambda g: g - g.mean(),
    "only read": lambda g: g.norm() and None,
    "in place": in_place(lambda g: g.mul_(0.5)),
    "only read in place": in_place(torch.norm),
}
OTHERS = {
    "clamp": lambda g: g.clamp(-1e-3, 1e-3),
    "normalized": lambda g: g / g.norm(),
    "sign": torch.sign,
    "absolute": torch.abs,
    "largest half": lambda g: g * (g.abs() >= g.abs().median()),
    "noise": lambda g: g + torch.randn_like(g),
    "clamp in place": in_place(lambda g: g.clamp_(-1e-3, 1e-3)),
    "step in place": step_at_once,
}


class Hooked(Net):
    """A model with a hook on each parameter."""

    def __init__(self, kind):
        super().__init__()
        for parameter in self.parameters():
            in_place = kind.endswith("in place")
            register = parameter.register_post_accumulate_grad_hook if in_place else parameter.register_hook
            register({**LINEAR, **OTHERS}[kind])


def two_steps(run):
    for number in range(2):
        run.backward(run.loss(number))
        run.step()


def trained_with_hook(kind, plugin):
    case = Case(build=partial(Hooked, kind), batch=noise(4, 6), optimizer=decaying)
    return drive(two_steps, case, None if plugin is None else Setting(PLUGINS[plugin]), 2, {})


@matrix(1, 1, kind=LINEAR, plugin=PLUGINS)
def test_a_hook_that_is_linear_equals_one_process(kind, plugin):
    assert_same_steps(run_on_ranks(trained_with_hook, 2, kind, plugin), trained_with_hook(kind, None), CASE)


@matrix(1, 1, kind=OTHERS, plugin=PLUGINS)
def test_a_hook_that_is_not_linear_raises_with_what_to_do(kind, plugin):
    match = "The hook .* is not linear in the gradient, or steps.*clip by `optimizer.clip_grad_by_value`"
    expect_on_ranks(GradientError, match, trained_with_hook, 2, kind, plugin)


@pytest.mark.parametrize("plugin", ["ddp", "gemini"])
@raises_on_ranks(GradientError, "of parameter 'head.weight' is not linear", 2)
def test_a_hook_that_comes_later_is_watched_too(plugin):
    run = boosted(plugin)
    two_steps(run)
    run.net.head.weight.register_hook(OTHERS["normalized"])
    two_steps(run)
