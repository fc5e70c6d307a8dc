"""Scripts that read, clip or drop ``parameter.grad`` under strategies that split gradients: right, or a clear error."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting
from compiler_warnings import ignore_compiler_warnings
from driven_runs import Run, assert_same_steps, drive
from matrix import matrix
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


def rows(number, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def decaying(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)


CASE = Case(build=Net, batch=rows, optimizer=decaying)


def boosted(plugin):
    return Run(CASE, Setting(PLUGINS[plugin]))


def run_under_all(plugins, loop):
    return {plugin: drive(loop, CASE, Setting(PLUGINS[plugin]), 2, {}) for plugin in plugins}


def assert_same_under_all(plugins, loop):
    """Compare what a loop makes of the parameters under each plugin with those of one process."""
    expected = drive(loop, CASE, None, 2, {})
    for by_plugin in run_on_ranks(run_under_all, 2, plugins, loop):
        for plugin, steps in by_plugin.items():
            try:
                assert_same_steps([steps], expected, CASE)
            except AssertionError as error:
                msg = f"{plugin}: {error}"
                raise AssertionError(msg) from None


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
    "pieces": lambda run: nn.utils.clip_grad_norm_([p for g in run.optimizer.param_groups for p in g["params"]], 1.0),
}


def reads(plugin):
    """Return what each way of reading raises, and what a gradient says of itself."""
    run = boosted(plugin)
    found = []
    for settles in (False, True):
        run.backward(run.loss(0))
        if settles:
            run.clip(0.1)
        for name, read in READS.items():
            try:
                read(run)
            except GradientError as error:
                found.append((name, str(error)))
            else:
                found.append((name, "nothing was raised"))
    gradient = run.net.head.weight.grad
    said = tuple(gradient.shape), gradient.dtype, gradient.device.type, gradient.requires_grad, repr(gradient)
    return found, (*said, f"{gradient}", gradient.numel())


@matrix(
    ["zero 1", "zero 2", "gemini", "gemini, one rank each", "hybrid, zero 0", "hybrid, zero 1"], plugin=list(PLUGINS)
)
def test_reading_a_split_gradient_raises_with_the_remedy(plugin):
    for found, said in run_on_ranks(reads, 2, plugin):
        wrong = [name for name, told in found if "`optimizer.clip_grad_by_norm(max_norm)`" not in told]
        assert wrong == []
        assert all("`booster_runtime.full_gradient(booster, model, '" in told for _, told in found)
        shown = "ShardedGradient('head.weight', shape=(3, 6), dtype=torch.float32)"
        assert said == ((3, 6), torch.float32, "cpu", False, shown, shown, 18)


def present(plugin):
    """Return the names of parameters that have a gradient after backward, after clipping, and after the step."""
    run = boosted(plugin)
    seen = []

    def look():
        seen.append(sorted(name for name, p in run.model.named_parameters() if p.grad is not None))

    look()
    run.backward(run.loss(0, branch=dist.get_rank() == 1))
    look()
    run.clip(0.1)
    look()
    run.optimizer.step()
    look()
    run.optimizer.zero_grad()
    look()
    return seen


# whose ranks use the same ones
@matrix(
    ["zero 1", "zero 2", "gemini, one rank each", "hybrid, zero 0", "hybrid, zero 1"],
    plugin=[name for name in PLUGINS if name != "gemini"],
)
def test_parameters_have_gradients_where_they_have_some_in_one_process(plugin):
    every = sorted(name for name, _ in Net().named_parameters())
    without = [name for name in every if "branch" not in name]
    first, second = run_on_ranks(present, 2, plugin)
    assert first == [[], without, every, every, []]
    assert second == [[], every, every, every, []]


# ---- dropping and zeroing is honoured


def drop_all(run):
    for parameter in run.model.parameters():
        parameter.grad = None


def own_zero_grad(run):
    run.net.zero_grad()


def zero_all(run):
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def zeroes_by_the_model(run):
    run.model.zero_grad(set_to_none=False)


def zeroes_by_the_own_model(run):
    run.net.zero_grad(set_to_none=False)


DROPS = {
    drop.__name__: drop for drop in (drop_all, own_zero_grad, zero_all, zeroes_by_the_model, zeroes_by_the_own_model)
}


def in_place_of_zero_grad(run, drop):
    for step in range(4):
        run.backward(run.loss(step, branch=step % 2 == 0))
        run.clip(0.1)
        run.optimizer.step()
        DROPS[drop](run)


def dropped_head(run):
    """Leave the head as it is in the first steps, as self-supervised methods do."""
    for step in range(4):
        run.backward(run.loss(step))
        if step < 2:
            for parameter in run.model.head.parameters():
                parameter.grad = None
        run.clip(0.1)
        run.optimizer.step()
        run.optimizer.zero_grad()


def dropped_after_clipping(run):
    for step in range(4):
        run.backward(run.loss(step))
        run.clip(0.1)
        if step % 2:
            run.model.head.weight.grad = None
            run.model.trunk[0].bias.grad.zero_()
        run.optimizer.step()
        run.optimizer.zero_grad()


def dropped_between_micro_batches(run):
    for step in range(3):
        run.backward(run.loss(step))
        run.model.head.weight.grad = None
        run.model.trunk[0].weight.grad.zero_()
        run.backward(run.loss(step + 10, branch=False))
        run.model.branch.bias.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()


def dropped_before_a_direct_backward(run):
    for step in range(3):
        run.loss(step).backward()
        run.model.head.weight.grad = None
        run.model.branch.weight.grad = None
        run.loss(step + 10, branch=False).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def directly_added_up(run):
    """Micro-batches whose losses a script runs backward from itself, the first two after one another."""
    for step in range(3):
        first, second = run.loss(step), run.loss(step + 10, branch=False)
        first.backward()
        second.backward()
        run.loss(step + 20).backward(create_graph=step == 1)
        run.clip(0.1)
        run.optimizer.step()
        run.optimizer.zero_grad()


def zeroed_and_added_to(run):
    for step in range(3):
        run.backward(run.loss(step))
        zero_all(run)
        run.loss(step + 10).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


LOOPS = {
    loop.__name__: loop
    for loop in (
        dropped_head,
        dropped_after_clipping,
        dropped_between_micro_batches,
        dropped_before_a_direct_backward,
        directly_added_up,
        zeroed_and_added_to,
    )
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@matrix(["dropped_after_clipping"], loop=list(LOOPS))
def test_parameters_equal_those_of_one_process(loop):
    assert_same_under_all(list(PLUGINS), LOOPS[loop])


@matrix(["zeroes_by_the_own_model"], drop=list(DROPS))
def test_gradients_may_be_dropped_in_place_of_zero_grad(drop):
    assert_same_under_all(SOME, partial(in_place_of_zero_grad, drop=drop))


def compiled(plugin):
    """Return the norm over micro-batches, plainly and compiled; later forwards see stand-ins."""
    ignore_compiler_warnings()
    norms = []
    for is_compiled in (False, True):
        run = boosted(plugin)
        if is_compiled:
            run.model.compile(backend="aot_eager")
        for micro in range(3):
            run.backward(run.loss(micro))
        norms.append(float(run.optimizer.clip_grad_by_norm(1.0)))
    return norms


@matrix(["hybrid, zero 0"], plugin=SOME)
def test_a_compiled_model_accumulates(plugin):
    for plain, of_compiled in run_on_ranks(compiled, 2, plugin, timeout_seconds=180):
        assert of_compiled == pytest.approx(plain, rel=1e-5)


# ---- what can't be honoured


def assigned(plugin, late):
    run = boosted(plugin)
    if late:
        run.backward(run.loss(0))
    run.net.head.weight.grad = torch.ones(3, 6)
    with pytest.raises(GradientError, match=r"`parameter.grad` of 'head.weight' was assigned by hand"):
        run.optimizer.step()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("plugin", SOME)
def test_a_gradient_made_by_hand_raises_at_the_step(plugin, late):
    run_on_ranks(assigned, 2, plugin, late)


def drops_pieces(plugin):
    run = boosted(plugin)
    run.backward(run.loss(0))
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    with pytest.raises(GradientError, match=r"A gradient in `optimizer.param_groups`.* was set to `None`"):
        run.optimizer.step()


@pytest.mark.parametrize("plugin", SOME)
def test_dropping_parts_of_gradients_raises(plugin):
    run_on_ranks(drops_pieces, 2, plugin)


def hooked(plugin):
    """Return what a hook on a parameter sees that a script registers after `boost`, as optimizers in backward do."""
    run = boosted(plugin)
    seen = []

    def look(parameter):
        with pytest.raises(GradientError, match=r"The gradient of 'head.weight' is split over the ranks"):
            parameter.grad.norm()
        seen.append(parameter.grad is not None)

    run.net.head.weight.register_post_accumulate_grad_hook(look)
    run.backward(run.loss(0))
    run.loss(1).backward()
    return seen


@pytest.mark.parametrize("plugin", SOME)
def test_a_hook_after_boost_sees_that_there_is_a_gradient_that_it_can_not_read(plugin):
    assert run_on_ranks(hooked, 2, plugin) == [[True, True]] * 2


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
WITH_DDP = {**PLUGINS, "ddp": TorchDDPPlugin}


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
    case = Case(build=partial(Hooked, kind), batch=rows, optimizer=decaying)
    return drive(two_steps, case, None if plugin is None else Setting(WITH_DDP[plugin]), 2, {})


@matrix(1, kind=LINEAR, plugin=WITH_DDP)
def test_a_hook_that_is_linear_equals_one_process(kind, plugin):
    assert_same_steps(run_on_ranks(trained_with_hook, 2, kind, plugin), trained_with_hook(kind, None), CASE)


@matrix(1, kind=OTHERS, plugin=WITH_DDP)
def test_a_hook_that_is_not_linear_raises_with_what_to_do(kind, plugin):
    match = "The hook .* is not linear in the gradient, or steps.*clip by `optimizer.clip_grad_by_value`"
    expect_on_ranks(GradientError, match, trained_with_hook, 2, kind, plugin)


def hook_after_boost(plugin):
    run = Run(CASE, Setting(WITH_DDP[plugin]))
    two_steps(run)
    run.net.head.weight.register_hook(OTHERS["normalized"])
    two_steps(run)


@pytest.mark.parametrize("plugin", ["ddp", "gemini"])
def test_a_hook_that_comes_later_is_watched_too(plugin):
    expect_on_ranks(GradientError, "of parameter 'head.weight' is not linear", hook_after_boost, 2, plugin)
