"""Matrices with fewer rows than there are ranks, of optimizers that need them whole and of others."""

from itertools import pairwise

import torch
import torch.distributed as dist
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

OPTIMIZERS = {
    "muon": lambda parameters: torch.optim.Muon(parameters, lr=0.05),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
}


def make():
    torch.manual_seed(0)
    widths = [6, 2, 3, 1, 4, 5]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))


def batch(step, size):
    return torch.randn(2 * size, 6, generator=torch.Generator().manual_seed(step)) + 1


def plainly(name, size):
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(3):
        model(batch(step, size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def boosted(name):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make()
    booster = Booster(plugin=TorchFSDPPlugin(unit_min_numel=4))
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS[name](model.parameters()))
    for step in range(3):
        booster.backward(model(batch(step, size)[rank::size]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return whole_model(booster, model)


@matrix(["adafactor"], name=list(OPTIMIZERS))
def test_matrices_with_fewer_rows_than_ranks_equal_one_process(name):
    expected = plainly(name, 4)
    for parameters in run_on_ranks(boosted, 4, name):
        assert_same_tensors(parameters, expected, tolerance_for(torch.float32))
