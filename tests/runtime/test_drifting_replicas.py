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
from booster_core.ranks import DistCoordinator
from booster_runtime import check_replicas
from booster_testing.models import TinyMLP


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
    torch.manual_seed(0)
    net, booster = TinyMLP(), Booster(plugin=ReferencePlugin())
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    def step():
        booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
        check_replicas(booster, model)
    if DistCoordinator().rank == 0:
        with torch.no_grad():
            if what == "parameter":
                net.second.bias[0] += 1e-6
            elif what == "optimizer":
                next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-6
            else:
                torch.rand(())
    step()
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
