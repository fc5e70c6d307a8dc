"""Optimizer state that exists when a lazy model is boosted: the same training as of an eager model, and as of torch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process

from booster_core.plugin import load
from booster_runtime import LazyInitContext
from booster_testing.models import TinyMLP

if TYPE_CHECKING:
    from torch import nn


def rows(number: int, replica: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + replica))


def accumulating(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)


def lazily() -> nn.Module:
    """Return a model that is lazy on ranks."""
    with LazyInitContext() if dist.is_initialized() else contextlib.nullcontext():
        return TinyMLP()


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
def test_state_made_at_construction_trains_as_in_one_process(plugin) -> None:
    case = Case(build=lazily, batch=rows, optimizer=accumulating, max_norm=None)
    assert_equals_one_process(case, Setting(load(plugin)))
