"""Backward through branches that torch's wrappers don't reduce: gradients and parameters equal one process's.

Loops that use the whole model are in the conformance kit.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
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


def loss_of(out):
    return out.square().mean()


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

    def backward(self, loss):
        loss.backward()

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

    def __init__(self, name):
        coordinator = DistCoordinator()
        super().__init__(coordinator.world_size)
        self.rank, self.world_size = coordinator.rank, coordinator.world_size
        kind, options = PLUGINS[name]
        self.booster = Booster("cpu", plugin=kind(**options))
        self.names = [name for name, _ in self.net.named_parameters()]
        self.model, self.optimizer, *_ = self.booster.boost(self.net, self.optimizer)

    def data(self, seed):
        return super().data(seed)[self.rank :: self.world_size]

    def backward(self, loss):
        self.optimizer.backward(loss)

    def no_sync(self):
        return self.booster.no_sync(self.model, self.optimizer)

    def step(self):
        found = {name: full_gradient(self.booster, self.model, name) for name in self.names}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        norm = self.optimizer.clip_grad_by_norm(0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()
        parameters = whole_model(self.booster, self.model)
        own = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        self.steps.append((gradients, {"norm": norm.clone()}, parameters, own))


# ---- what a user's loop does between two steps


def lone_no_sync_of_a_branch(run, step):
    with run.no_sync():
        run.backward(loss_of(run.model(run.data(step), "l" if step else "lr")))


def no_sync_then_other_branch(run, step):
    with run.no_sync():
        run.backward(loss_of(run.model(run.data(step), "l" if step else "lr")))
    run.backward(loss_of(run.model(run.data(step + 10), "r" if step else "lr")))


LOOPS = {loop.__name__: loop for loop in (lone_no_sync_of_a_branch, no_sync_then_other_branch)}


def boosted_steps(name, loop):
    run = Boosted(name)
    for step in range(3):
        LOOPS[loop](run, step)
        run.step()
    return run.steps


def assert_parity(name, loop, world_size):
    plain = Plain(world_size)
    for step in range(3):
        LOOPS[loop](plain, step)
        plain.step()
    by_rank = run_on_ranks(boosted_steps, world_size, name, loop)
    for steps in by_rank:
        for step, (expected, found) in enumerate(zip(plain.steps, steps, strict=True)):
            for theirs, ours in zip(expected, found[:3], strict=True):
                assert ours.keys() == theirs.keys(), step
                assert_same_tensors(ours, theirs, tolerance_for(torch.float32))
    if name.startswith("ddp"):
        first, *others = [steps[-1][3] for steps in by_rank]
        for other in others:
            assert all(torch.equal(tensor, other[key]) for key, tensor in first.items())


@pytest.mark.parametrize("name", PLUGINS)
def test_branch_under_no_sync_alone(name):
    assert_parity(name, "lone_no_sync_of_a_branch", 2)


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_branch_under_no_sync_on_three_ranks(name):
    assert_parity(name, "lone_no_sync_of_a_branch", 3)


@pytest.mark.parametrize("name", ["ddp, unused", "fsdp"])
def test_branch_under_no_sync_and_another_after_it(name):
    assert_parity(name, "no_sync_then_other_branch", 2)
