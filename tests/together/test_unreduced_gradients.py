"""Backward through branches that torch's wrappers don't reduce: gradients and parameters equal one process's.

Loops that use the whole model are in the conformance kit.
"""

from __future__ import annotations

import pytest
import torch
from cases import Case, Setting
from driven_runs import assert_same_loop
from torch import nn

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "ddp, views": (TorchDDPPlugin, {"gradient_as_bucket_view": True, "find_unused_parameters": False}),
    "ddp, unused": (TorchDDPPlugin, {"find_unused_parameters": True}),
    "ddp, small buckets": (TorchDDPPlugin, {"bucket_cap_mb": 1e-4}),
    "fsdp": (TorchFSDPPlugin, {"unit_min_numel": 32}),
    "fsdp, one unit": (TorchFSDPPlugin, {}),
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


def rows(number, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


# ---- what a user's loop does between two steps


def lone_no_sync_of_a_branch(run):
    for step in range(3):
        with run.no_sync():
            run.backward(run.loss(step, branches="l" if step else "lr"))
        run.gradients()  # averages what is left to average
        run.step(max_norm=0.05)


def no_sync_then_other_branch(run):
    for step in range(3):
        with run.no_sync():
            run.backward(run.loss(step, branches="l" if step else "lr"))
        run.backward(run.loss(step + 10, branches="r" if step else "lr"))
        run.gradients()  # averages what is left to average
        run.step(max_norm=0.05)


def branches_of_ranks(run, number):
    run.backward(run.mean(number, lambda batch, rank: run.case.loss(run.model(batch, branches="lr"[rank]), batch)))


def adds_a_branch_of_each_rank(run):
    """Ranks use other branches while parameters have gradients already: zeros, or those of an earlier backward."""
    run.backward(run.loss(0))
    run.optimizer.zero_grad(set_to_none=False)
    branches_of_ranks(run, 1)
    run.step()
    run.backward(run.loss(2))
    branches_of_ranks(run, 3)
    run.step(max_norm=0.05)


def assert_parity(name, loop, num_ranks=2):
    setting = Setting(*PLUGINS[name], num_ranks)
    assert_same_loop(loop, Case(build=Forked, batch=rows), setting, own=name.startswith("ddp"))


@pytest.mark.parametrize("name", PLUGINS)
def test_branch_under_no_sync_alone(name):
    assert_parity(name, lone_no_sync_of_a_branch)


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_branch_under_no_sync_on_three_ranks(name):
    assert_parity(name, lone_no_sync_of_a_branch, 3)


@pytest.mark.parametrize("name", ["ddp, unused", "fsdp"])
def test_branch_under_no_sync_and_another_after_it(name):
    assert_parity(name, no_sync_then_other_branch)


@pytest.mark.parametrize("name", ["ddp, unused", "fsdp, one unit"])
def test_branch_of_each_rank_is_added_to_gradients_of_all(name):
    assert_parity(name, adds_a_branch_of_each_rank)
