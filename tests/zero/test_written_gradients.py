"""Gradients that are written by name reach every rank's part of a parameter, wherever buckets are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_runtime import full_gradient
from booster_runtime.whole_tensors import set_full_gradient
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin


def write_and_step(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    booster = Booster("cpu", plugin=LowLevelZeroPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    booster.backward(model(torch.ones(2, 5)).sum(), optimizer)
    written = {
        name: torch.arange(1.0, 1 + tensor.numel()).view(tensor.shape) * number
        for number, (name, tensor) in enumerate(before.items(), 1)
    }
    for name, values in written.items():
        set_full_gradient(booster, model, name, values)
    assert all(torch.equal(full_gradient(booster, model, name), values) for name, values in written.items())
    optimizer.step()
    for name, parameter in model.unwrap().named_parameters():
        assert torch.equal(parameter, before[name] - 0.5 * written[name]), name


@pytest.mark.parametrize(
    "options", [{"stage": 1}, {"stage": 2, "bucket_bytes": 128}], ids=["one bucket", "small buckets"]
)
@pytest.mark.parametrize("num_ranks", [2, 3])  # cut in the middle of a parameter, and of several
def test_written_gradients_are_read_and_stepped_with(num_ranks, options):
    run_on_ranks(write_and_step, num_ranks, options)
