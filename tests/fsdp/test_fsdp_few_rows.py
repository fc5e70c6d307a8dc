"""Matrices with fewer rows than there are ranks, of optimizers that need them whole and of others."""

from functools import partial
from itertools import pairwise

import torch
from cases import Case, Setting, assert_equals_one_process
from matrix import matrix
from torch import nn

from booster_fsdp import TorchFSDPPlugin

OPTIMIZERS = {"muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor, "adamw": torch.optim.AdamW}


def make():
    widths = [6, 2, 3, 1, 1, 4, 5]  # one matrix has one element
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))


def batch(number, replica):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + replica)) + 1


def optimizer_named(name, model):
    return OPTIMIZERS[name](model.parameters(), lr=0.05)


@matrix(["adafactor"], name=list(OPTIMIZERS))
def test_matrices_with_fewer_rows_than_ranks_equal_one_process(name, tmp_path):
    case = Case(build=make, batch=batch, optimizer=partial(optimizer_named, name), max_norm=None)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"unit_min_numel": 4}, 4), checkpoint=tmp_path)
