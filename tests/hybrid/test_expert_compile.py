"""``torch.compile`` of models with spread experts: the gradients of one process, by parameter, over several steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compiled_ways import in_place, layers, whole
from compiler_warnings import ignore_compiler_warnings
from expert_models import batch_of, make

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks

LIMITS = {"timeout_seconds": 600.0, "group_timeout_seconds": 300.0}
"""Ranks compile for as long as a busy machine lets them, and wait for each other's tokens meanwhile."""
STEPS = 2
"""The second step shows whether the first one changed every parameter, and calls what is compiled again."""


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def compare(name, options, before, after):
    ignore_compiler_warnings()
    data_size = dist.get_world_size() // options.get("tp_size", 1)
    plain, model = (make(name, dtype=torch.float32, num_hidden_layers=1) for _ in range(2))  # two take twice as long
    reference = make_optimizer(plain)
    model = model if before is None else before(model)
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    data_rank, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    model = model if after is None else after(model)
    for step in range(STEPS):
        for each in range(data_size):
            (plain(**batch_of(step, each)).loss / data_size).backward()
        booster.backward(model(**batch_of(step, data_rank)).loss, optimizer)
        for key, parameter in plain.named_parameters():
            if parameter.grad is not None:
                found = full_gradient(booster, model, key)
                torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=2e-6, msg=f"{step} {key}")
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(whole, None, marks=pytest.mark.slow),
        pytest.param(in_place, None, marks=pytest.mark.slow),
        pytest.param(None, whole, marks=pytest.mark.slow),
        pytest.param(None, in_place, marks=pytest.mark.slow),
        (layers, None),  # the least to compile; experts break graphs in the same way
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_compiled_models_have_the_gradients_of_one_process(name, before, after):
    run_on_ranks(compare, 2, name, {"ep_size": 2}, before, after, **LIMITS)
