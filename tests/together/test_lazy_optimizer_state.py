"""Optimizer state that exists when a lazy model is boosted: the same training as of an eager model, and as of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime import LazyInitContext
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

PLUGINS = ["ddp", "fsdp", "zero", "gemini", "hybrid"]


class Penalized(nn.Module):
    """A model whose forward takes a tensor that is kept by no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        scale = torch.rand(4)
        self.scale = lambda: scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale()


def data(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Penalized()
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)


def train_boosted(plugin: str) -> dict[str, torch.Tensor]:
    coordinator = DistCoordinator()
    with LazyInitContext():
        model, optimizer = build(seed=3)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(2):
        batch = data(step)[coordinator.rank :: coordinator.world_size]
        booster.backward(boosted(batch).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return whole_model(booster, boosted)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_state_made_at_construction_trains_as_in_one_process(plugin) -> None:
    model, optimizer = build(seed=3)
    for step in range(2):
        model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for whole in run_on_ranks(train_boosted, 2, plugin):
        assert_same_tensors(whole, model.state_dict(), tolerance_for(torch.float32))
