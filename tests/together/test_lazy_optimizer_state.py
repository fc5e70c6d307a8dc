"""Optimizer state that exists when a lazy model is boosted: the same training as of an eager model, and as of torch."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process
from torch import nn

from booster_core.plugin import load
from booster_runtime import LazyInitContext


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


def rows(number: int, replica: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + replica))


def accumulating(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)


def lazily() -> nn.Module:
    """Return a model that is lazy on ranks."""
    with LazyInitContext() if dist.is_initialized() else contextlib.nullcontext():
        return Penalized()


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
def test_state_made_at_construction_trains_as_in_one_process(plugin) -> None:
    case = Case(build=lazily, batch=rows, optimizer=accumulating, max_norm=None)
    assert_equals_one_process(case, Setting(load(plugin)))
