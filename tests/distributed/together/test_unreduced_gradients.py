"""Steps after backward passes that torch's wrappers don't reduce: each gradient and parameter equals one process's."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from booster_core import Booster, PrecisionPolicy
from booster_core.precision import LossScaleConfig
from booster_core.ranks.coordinator import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import Tolerance, assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "ddp, views": (TorchDDPPlugin, {"gradient_as_bucket_view": True, "find_unused_parameters": False}),
    "ddp, unused": (TorchDDPPlugin, {"find_unused_parameters": True}),
    "ddp, small buckets": (TorchDDPPlugin, {"bucket_cap_mb": 1e-4}),
    "fsdp": (TorchFSDPPlugin, {"unit_min_numel": 32}),
    "fsdp, replicas": (TorchFSDPPlugin, {"unit_min_numel": 32, "replica_size": 2}),
    "fsdp, whole": (TorchFSDPPlugin, {"unit_min_numel": 32, "ignored_modules": ["left"], "partition": "parameter"}),
}
SCALE = 1024.0


class Forked(nn.Module):
    """A trunk and two branches, of which a caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, branches="lr"):
        hidden = self.trunk(x) * self.temperature
        parts = [layer(hidden) for key, layer in (("l", self.left), ("r", self.right)) if key in branches]
        return sum(parts).tanh()


def loss_of(out, power=2):
    return out.abs().pow(power).mean()


class Plain:
    """One process with the whole batch."""

    rank, world_size = 0, 1

    def __init__(self, world_size):
        torch.manual_seed(3)
        self.net = self.model = Forked()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.samples = 4 * world_size
        self.steps = []

    def data(self, seed):
        return torch.randn(self.samples, 6, generator=torch.Generator().manual_seed(seed))

    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)

    def no_sync(self):
        return contextlib.nullcontext()

    def step(self):
        gradients = {name: p.grad.clone() for name, p in self.net.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()
        parameters = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        self.steps.append((gradients, {"norm": norm}, parameters))


class Boosted(Plain):
    """This rank with its share of the batch."""

    def __init__(self, name, precision):
        coordinator = DistCoordinator()
        super().__init__(coordinator.world_size)
        self.rank, self.world_size = coordinator.rank, coordinator.world_size
        kind, options = PLUGINS[name]
        policy = None
        if precision == "fp16":
            policy = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=SCALE))
        self.booster = Booster("cpu", policy, kind(**options))
        self.names = [name for name, _ in self.net.named_parameters()]
        self.model, self.optimizer, *_ = self.booster.boost(self.net, self.optimizer)

    def data(self, seed):
        return super().data(seed)[self.rank :: self.world_size]

    def backward(self, loss, **kwargs):
        self.optimizer.backward(loss, **kwargs)

    def no_sync(self):
        return self.booster.no_sync(self.model, self.optimizer)

    def step(self):
        found = {name: self.booster.full_gradient(self.model, name) for name in self.names}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        norm = self.optimizer.clip_grad_by_norm(0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()
        parameters = whole_model(self.booster, self.model)
        own = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        self.steps.append((gradients, {"norm": norm.clone()}, parameters, own))


# ---- what a user's loop does between two steps


def accumulate_2_of_5(run, step):
    """Micro-batches in pairs, the last of an epoch alone, and under `no_sync` as any first one of a pair."""
    for micro in range(1 if step == 2 else 2):
        with run.no_sync() if micro == 0 else contextlib.nullcontext():
            run.backward(loss_of(run.model(run.data(10 * step + micro))))


def lone_no_sync_of_a_branch(run, step):
    with run.no_sync():
        run.backward(loss_of(run.model(run.data(step), "l" if step else "lr")))


def no_sync_then_other_branch(run, step):
    with run.no_sync():
        run.backward(loss_of(run.model(run.data(step), "l" if step else "lr")))
    run.backward(loss_of(run.model(run.data(step + 10), "r" if step else "lr")))


def direct_backward_under_no_sync(run, step):
    with run.no_sync():
        loss_of(run.model(run.data(step))).backward()


def graph_twice(run, step):
    out = run.model(run.data(step))
    run.backward(loss_of(out), retain_graph=True)
    run.backward(loss_of(out, 3))


def graph_twice_directly(run, step):
    out = run.model(run.data(step))
    loss_of(out).backward(retain_graph=True)
    loss_of(out, 3).backward()


def graph_twice_under_no_sync(run, step):
    with run.no_sync():
        graph_twice(run, step)


def two_forwards_then_backwards(run, step):
    first, second = run.model(run.data(step)), run.model(run.data(step + 10))
    run.backward(loss_of(first))
    run.model.eval()
    with torch.no_grad():
        run.model(run.data(step + 20))
    run.model.train()
    run.backward(loss_of(second))


def two_forwards_one_backward(run, step):
    first, second = run.model(run.data(step)), run.model(run.data(step + 10))
    run.backward(loss_of(first) + loss_of(second, 3))


def norm_between(run, step):
    """A norm in the middle of an accumulation reduces what is there, and the rest is added."""
    with run.no_sync():
        run.backward(loss_of(run.model(run.data(step))))
    if run.world_size > 1:
        run.optimizer.clip_grad_by_norm(1e9)
    with run.no_sync():
        run.backward(loss_of(run.model(run.data(step + 10))))


LOOPS = {
    loop.__name__: loop
    for loop in (
        accumulate_2_of_5,
        lone_no_sync_of_a_branch,
        no_sync_then_other_branch,
        direct_backward_under_no_sync,
        graph_twice,
        graph_twice_directly,
        graph_twice_under_no_sync,
        two_forwards_then_backwards,
        two_forwards_one_backward,
        norm_between,
    )
}


def boosted_steps(name, loop, precision=None):
    run = Boosted(name, precision)
    for step in range(3):
        LOOPS[loop](run, step)
        run.step()
    return run.steps


def assert_parity(name, loop, world_size, precision=None, tolerance=None):
    tolerance = tolerance or tolerance_for(torch.float32)
    plain = Plain(world_size)
    for step in range(3):
        LOOPS[loop](plain, step)
        plain.step()
    by_rank = run_on_ranks(boosted_steps, world_size, name, loop, precision)
    for steps in by_rank:
        for step, (expected, found) in enumerate(zip(plain.steps, steps, strict=True)):
            for theirs, ours in zip(expected, found[:3], strict=True):
                assert ours.keys() == theirs.keys(), step
                assert_same_tensors(ours, theirs, tolerance)
    if name.startswith("ddp"):
        for *_, own in zip(*by_rank, strict=True):
            for rank in range(1, world_size):
                for key, tensor in by_rank[0][-1][3].items():
                    assert torch.equal(tensor, by_rank[rank][-1][3][key]), (key, rank, len(own))


@pytest.mark.covering(1)  # every loop under DDP or FSDP; the other pairs are slow
@pytest.mark.parametrize("loop", sorted(LOOPS.keys() - {"no_sync_then_other_branch"}))
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_steps_equal_those_of_one_process(name, loop):
    assert_parity(name, loop, 2)


@pytest.mark.covering(1)  # every option with one of the loops; the other pairs are slow
@pytest.mark.parametrize("name", ["ddp, views", "ddp, unused", "ddp, small buckets", "fsdp, replicas", "fsdp, whole"])
@pytest.mark.parametrize("loop", ["accumulate_2_of_5", "graph_twice"])
def test_options_leave_nothing_unreduced(name, loop):
    assert_parity(name, loop, 2)


@pytest.mark.parametrize("name", ["ddp, unused", "fsdp"])
def test_no_sync_and_a_backward_through_other_parameters(name):
    assert_parity(name, "no_sync_then_other_branch", 2)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_three_ranks_leave_nothing_unreduced(name):
    assert_parity(name, "accumulate_2_of_5", 3)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_loss_scale_is_taken_out_of_reduced_gradients(name):
    fp16 = Tolerance(relative=2e-2, reason="a dozen operations in fp16, whose roundings are 2**-11 each")
    assert_parity(name, "accumulate_2_of_5", 2, "fp16", fp16)
