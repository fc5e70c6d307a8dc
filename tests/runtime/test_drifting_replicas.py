"""Replicas that drift are found, with the tensor and the ranks."""

import contextlib
import re

import pytest
import torch
from ranked import on_ranks
from reference_plugins import ReferencePlugin
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError
from booster_core.plugin import unwrap_model
from booster_core.ranks import DistCoordinator
from booster_runtime import check_replicas
from booster_testing.models import TinyMLP


def boost():
    torch.manual_seed(0)
    model = TinyMLP()
    booster = Booster(plugin=ReferencePlugin())
    boosted = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return booster, boosted.model, boosted.optimizer


def step(booster, model, optimizer):
    booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("parameter", "'second.bias' (rank 0 against rank 1)"),
        ("optimizer", "'exp_avg' of 'first.weight' (rank 0 against rank 1)"),
        ("random", None),  # data parallel ranks may draw different random numbers
    ],
)
@on_ranks(2)
def test_a_drift_is_named_on_every_rank(what, message):
    """Let the first rank change something after two steps."""
    booster, model, optimizer = boost()
    for _ in range(2):
        step(booster, model, optimizer)
        check_replicas(booster, model)
    if DistCoordinator().rank == 0:
        with torch.no_grad():
            if what == "parameter":
                unwrap_model(model).second.bias[0] += 1e-6
            elif what == "optimizer":
                next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-6
            else:
                torch.rand(())
    step(booster, model, optimizer)
    with contextlib.nullcontext() if message is None else pytest.raises(GradientError, match=re.escape(message)):
        check_replicas(booster)


@on_ranks(2)
def test_running_statistics_of_batch_norm_may_differ():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    booster = Booster(plugin=ReferencePlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(DistCoordinator().rank))
    booster.backward(model(inputs).square().mean(), optimizer)
    optimizer.step()
    check_replicas(booster, model)
